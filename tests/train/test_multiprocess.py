"""Real processes with gloo, started by accelerate and by torchrun, against one process on the same global batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from draftwood import configs
from draftwood.configs.load import load_config
from draftwood.models.target import load_target
from draftwood.train.loop import distill

_SUPPORT = Path(tiny_run.__file__).parent
_BIN = Path(sys.executable).parent
_TWO = Path(configs.__file__).parent / "accelerate" / "two_processes.yaml"
LAUNCHERS = {
    2: [_BIN / "accelerate", "launch", "--config_file", _TWO],
    3: [_BIN / "torchrun", "--nproc-per-node", "3"],
}
# 25 training rows: the last global batch of 4 or 6 has one row, so all ranks but one have none.
RUNS = {
    "plain": {1: ["loop.batch_size=6"], 2: ["loop.batch_size=3"], 3: ["loop.batch_size=2"]},
    "accumulated": {
        1: ["loop.batch_size=12"],
        2: ["loop.batch_size=3", "loop.gradient_accumulation=2"],
        3: ["loop.batch_size=2", "loop.gradient_accumulation=2"],
    },
}


def overrides(folder, name, *more):
    base = tiny_run.overrides_for(folder)
    return [*base, "data.num_validation=4", f"output={folder}/runs", f"name={name}", "loop.save_every=2", *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    tiny_run.make(folder)
    target = load_target(str(folder / "target"))
    for name, options in RUNS.items():
        distill(load_config(None, overrides(folder, f"{name}-1", *options[1])), target)
    return folder


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def launched(request, folder):
    """Folder and number of processes, once the launcher has run all of RUNS, and one run stopped and gone on with."""
    count = request.param
    plan = [overrides(folder, f"{name}-{count}", *options[count]) for name, options in RUNS.items()]
    stopped = overrides(folder, f"stopped-{count}", *RUNS["plain"][count])
    plan += [["stop-rank-1@3", *stopped], stopped]
    path = folder / f"plan-{count}.json"
    path.write_text(json.dumps(plan))
    ran = subprocess.run(
        [*map(str, LAUNCHERS[count]), str(_SUPPORT / "run_many.py"), str(path)],
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, "\n".join(x for x in ran.stderr.splitlines() if "rror" in x or "File" in x)
    return folder, count


def log_of(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last_weights(folder, name):
    return load_file(max((folder / "runs" / name / "checkpoints").iterdir()) / "draft.safetensors")


def test_the_launcher_really_started_that_many_processes(launched):
    folder, count = launched
    for rank in range(count):
        outcomes = (folder / f"plan-{count}.rank{rank}").read_text().splitlines()
        assert outcomes == [f"{how} of {count}" for how in ("finished", "finished", "stopped", "finished")]
    assert not (folder / f"plan-{count}.rank{count}").exists()


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_metrics_are_those_of_one_process_on_the_same_global_batch(launched, name):
    folder, count = launched
    alone, shared = log_of(folder, f"{name}-1"), log_of(folder, f"{name}-{count}")
    assert [(r["kind"], r["step"], r["num_rows"]) for r in alone] == [
        (r["kind"], r["step"], r["num_rows"]) for r in shared
    ]
    for a, b in zip(alone, shared, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a.get("grad_norm", 0) == pytest.approx(b.get("grad_norm", 0), rel=1e-2)
    for a, b in zip(
        last_weights(folder, f"{name}-1").values(), last_weights(folder, f"{name}-{count}").values(), strict=True
    ):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)


def test_one_rank_asked_to_stop_stops_all_after_the_same_step_and_the_run_goes_on_exactly(launched):
    folder, count = launched
    whole, stopped = log_of(folder, f"plain-{count}"), log_of(folder, f"stopped-{count}")
    assert [r["step"] for r in whole] == [r["step"] for r in stopped]
    # Of three summands the order counts, and it changes when DistributedDataParallel sorts its buckets anew.
    tolerance = 0.0 if count == 2 else 1e-5
    for a, b in zip(whole, stopped, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance, abs=0)
    for a, b in zip(
        last_weights(folder, f"plain-{count}").values(), last_weights(folder, f"stopped-{count}").values(), strict=True
    ):
        torch.testing.assert_close(a, b, atol=10 * tolerance, rtol=0)
