"""Compile every Triton kernel for a GPU that need not be there: `python -m draftwood.kernels.compile_report`.

Prints registers per thread, spilled bytes per thread and shared memory per block, at the sizes of an 8B hybrid.
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftwood.kernels import (
    distill_loss_triton,
    tree_attention_triton,
    tree_conv_triton,
    tree_delta_triton,
    tree_scan_triton,
    tree_selective_triton,
)
from draftwood.kernels.decay import NO_LIMIT
from draftwood.kernels.distill_terms import DistillWeights
from draftwood.kernels.tables import TreeTables
from draftwood.kernels.triton_common import Launch, recorded_launches

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Usage:
    kernel: str
    nodes: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    code_bytes: int


def launches(nodes: int, scale: int = 1) -> list[Launch]:
    """Every kernel at the sizes of an 8B hybrid (divided by `scale`), bfloat16 activations, all options on."""
    tables = TreeTables.from_parents(torch.arange(-1, nodes - 1)[None])
    heads, width, states, groups = 32 // scale, 128 // scale, 128 // scale, 8 // scale
    f32, bf16 = torch.float32, torch.bfloat16

    def t(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    valid, last = torch.ones(1, nodes, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    x, keys = t(1, nodes, heads, width), t(1, nodes, groups, states)
    state, steps = t(1, heads, width, states, dtype=f32), t(1, nodes, heads, dtype=f32)
    per_head = t(heads, dtype=f32)
    with recorded_launches() as recorded:
        scan_options = (per_head, x, per_head, True, NO_LIMIT, valid, f32)
        tree_scan_triton.tree_scan(x, t(1, nodes, heads), per_head, keys, keys, tables, state, *scan_options)
        tree_scan_triton.advance(x, keys, steps, per_head, state, tables, last, f32)

        inner = heads * width
        channels, window, taps = t(1, inner, nodes), t(1, inner, 4), t(inner, 4)
        tree_conv_triton.tree_conv(channels, window, taps, tables, t(inner), "silu", valid, f32)
        tree_conv_triton.commit(window, channels, tables, last)

        q = t(1, nodes, heads, width, dtype=f32)
        for g in (steps, q):
            tree_delta_triton.tree_delta(q, q, q, g, steps, tables, state, 1.0)
            tree_delta_triton.advance(q, q, g, state, tables, last)

        A, small = t(inner, 16, dtype=f32), t(1, 16, nodes)
        channel, narrow = t(inner, dtype=f32), t(1, inner, 16, dtype=f32)
        wide = t(1, inner, nodes, dtype=f32)
        selective_options = (channel, channels, channel, True, valid, f32)
        tree_selective_triton.tree_selective(channels, channels, A, small, small, tables, narrow, *selective_options)
        tree_selective_triton.advance(channels, wide, A, small, narrow, tables, last, f32)

        queries, prefix, tree = t(1, heads, nodes, width), t(1, groups, 1024, width), t(1, groups, nodes, width)
        tree_attention_triton.tree_attention(queries, prefix, prefix, tree, tree, last, tables, 1.0, valid, f32)

        drafts, places, per_place = t(3, 2, 128256 // scale), t(2, dtype=torch.int64), t(2, dtype=f32)
        distill_loss_triton.probabilities_(drafts[0])
        for eta in (None, 3.0):
            weights = DistillWeights(acceptance=1.0, acceptance_eta=eta)
            distill_loss_triton.weigh_(drafts, drafts[0], places, per_place, per_place, weights, True)
    return recorded


def compile_launch(recorded: Launch, target: GPUTarget) -> Any:
    """The compiled kernel of one recorded launch, specialised as a launch would: divisible by 16 where it is."""
    kernel, _, arguments = recorded
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in constants or (isinstance(value, int) and value == 1):
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    return triton.compile(ASTSource(kernel, signature, constexprs, attributes), target=target, options=options)


def usage(compiled: Any, kernel: str, nodes: int) -> Usage:
    """What the machine code needs, as its own tools report it."""
    if "cubin" in compiled.asm:
        code = compiled.asm["cubin"]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            tool = triton.knobs.nvidia.cuobjdump.path
            report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        registers = int(_found(r"REG:(\d+)", report))
        spilled = int(_found(r"LOCAL:(\d+)", report)) + int(_found(r"STACK:(\d+)", report))
    else:
        code = compiled.asm["hsaco"]
        text = compiled.asm["amdgcn"]
        registers = int(_found(r"\.vgpr_count:\s+(\d+)", text))
        spilled = 4 * int(_found(r"\.vgpr_spill_count:\s+(\d+)", text))
    return Usage(kernel, nodes, registers, spilled, compiled.metadata.shared, len(code))


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, f"{pattern} is not in the report:\n{text[:500]}"
    return match.group(1)


def report(target: str, nodes: int, scale: int = 1) -> list[Usage]:
    """One line per kernel; raises what the compiler raises."""
    rows = []
    for recorded in launches(nodes, scale):
        kernel, _, arguments = recorded
        name = kernel.fn.__name__ + (" (per channel)" if arguments.get("PER_CHANNEL") else "")
        rows.append(usage(compile_launch(recorded, TARGETS[target]), name, nodes))
    return rows


def main() -> None:
    print(f"{'target':8}{'kernel':44}{'nodes':>6}{'registers':>11}{'spilled':>9}{'shared':>8}{'code':>8}")
    for target in sys.argv[1:] or TARGETS:
        for nodes in (13, 64):
            for row in report(target, nodes):
                numbers = f"{row.registers:11}{row.spilled_bytes:9}{row.shared_bytes:8}{row.code_bytes:8}"
                print(f"{target:8}{row.kernel:44}{row.nodes:6}{numbers}", flush=True)


if __name__ == "__main__":
    main()
