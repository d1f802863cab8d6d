"""Check the Triton kernels on a GPU against float64, then time them. Ends within six minutes.

python scripts/gpu_check.py --json gpu.json
python scripts/gpu_check.py --smoke            # tiny sizes in Triton's interpreter, without a GPU
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from itertools import chain
from pathlib import Path

BUDGET_S = 300.0


def main() -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes in the interpreter")
    arguments = parser.parse_args()
    if arguments.smoke:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # triton reads the variable once, when it is imported.
    import torch
    from rich.console import Console

    from draftwood.decode.benchmark import step_benchmarks
    from draftwood.kernels import gpu_bench, gpu_bench_distill

    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("no GPU is visible; --smoke runs tiny sizes without one")
    device = torch.device("cpu" if arguments.smoke else "cuda")
    name = "interpreter" if arguments.smoke else torch.cuda.get_device_name()
    shape = gpu_bench.SMOKE if arguments.smoke else gpu_bench.Shape()
    loss_shape = gpu_bench_distill.SMOKE if arguments.smoke else gpu_bench_distill.LossShape()
    sizes = (5,) if arguments.smoke else (13, 64)

    checks = []
    for check in chain(gpu_bench.checks(device, shape, sizes), gpu_bench_distill.checks(device, loss_shape)):
        checks.append(check)
        verdict = "ok" if check.passed else "WRONG"
        print(f"{check.operator:36}{check.nodes:4} {check.dtype:9} error {check.error:.1e}  {verdict}", flush=True)
    print(f"\n{name}, microseconds:\n{'':36}{'nodes':>5}{'graph':>9}{'called':>9}{'torch':>9}{'bytes':>9}")
    timings = []
    loss_timings = gpu_bench_distill.timings(device, loss_shape)
    for timing in chain(loss_timings, gpu_bench.timings(device, shape, sizes, start + BUDGET_S)):
        timings.append(timing)
        figures = (timing.graph_us, timing.eager_us, timing.torch_us, timing.bytes_us)
        numbers = "".join(f"{'-':>9}" if figure is None else f"{figure:9.1f}" for figure in figures)
        print(f"{timing.name:36}{timing.nodes:5}{numbers}  {timing.note}", flush=True)
    steps = []
    for shape_name, graph, result in step_benchmarks(device, arguments.smoke, start + BUDGET_S):
        Console().print(f"{shape_name}, {'captured as a graph' if graph else 'eager'}", result.table())
        steps.append({"shape": shape_name, "graph": graph, **dataclasses.asdict(result)})
    if arguments.json:
        results = {"device": name, "checks": [dataclasses.asdict(row) for row in checks]}
        results |= {"timings": [dataclasses.asdict(row) for row in timings], "steps": steps}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
