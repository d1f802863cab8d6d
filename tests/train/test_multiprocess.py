"""Real processes with gloo, started by accelerate and by torchrun, against one process on the same global batches; and
a draft sharded among them (FSDP) against one that each holds whole (DDP)."""

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
from draftwood.train.prepare import load_rows
from draftwood.train.setup import start_processes

_SUPPORT = Path(tiny_run.__file__).parent
_BIN = Path(sys.executable).parent
_CONFIGS = Path(configs.__file__).parent / "accelerate"
LAUNCHERS = {
    2: [_BIN / "accelerate", "launch", "--config_file", _CONFIGS / "two_processes.yaml"],
    3: [_BIN / "torchrun", "--nproc-per-node", "3"],
    "sharded": [_BIN / "accelerate", "launch", "--config_file", _CONFIGS / "fsdp.yaml"],
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


# Of two processes the second validates nothing, as the four rows are one batch; and the first decodes meanwhile.
MUON = ["optimizer.name=muon", "loop.batch_size=4", "loop.max_steps=4", "loop.decode_every=2"]
MUON += ["evaluate.num_prompts=1", "evaluate.max_new_tokens=4"]


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


def launch(folder, how, plan):
    path = folder / f"plan-{how}.json"
    path.write_text(json.dumps(plan))
    ran = subprocess.run(
        [*map(str, LAUNCHERS[how]), str(_SUPPORT / "run_many.py"), str(path)],
        env={
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(folder),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = ("rror", "File", "terminate", "what()")  # the last two: of an abort in C++
    assert ran.returncode == 0, "\n".join(x for x in ran.stderr.splitlines() if any(word in x for word in told))


def plan_of(folder, count):
    """All of RUNS, the first on rows that are not prepared yet and tracked, and one run stopped and gone on with."""
    plan = [overrides(folder, f"{name}-{count}", *options[count]) for name, options in RUNS.items()]
    plan[0] += [f"data.folder={folder}/data-{count}", "loop.tracker=wandb"]
    stopped = overrides(folder, f"stopped-{count}", *RUNS["plain"][count])
    return [*plan, ["stop-rank-1@3", *stopped], stopped]


@pytest.fixture(scope="module")
def two(folder):
    begun = overrides(folder, "ddp-fsdp", *RUNS["plain"][2])
    launch(folder, 2, [*plan_of(folder, 2), overrides(folder, "muon-2", *MUON), ["stop-rank-1@3", *begun]])
    return folder, 2


@pytest.fixture(scope="module")
def three(folder):
    launch(folder, 3, plan_of(folder, 3))
    return folder, 3


@pytest.fixture(scope="module", params=["two", pytest.param("three", marks=pytest.mark.slow)])
def launched(request):
    """Folder and number of processes, once the launcher has run all that is planned."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def sharded(two):
    """The folder, once two processes with a sharded draft have run as the two of `two` have."""
    folder, _ = two
    stopped = overrides(folder, "stopped-sharded", *RUNS["accumulated"][2])
    begun, gone_on = (overrides(folder, name, *RUNS["plain"][2]) for name in ("fsdp-ddp", "ddp-fsdp"))
    whole = [overrides(folder, "accumulated-sharded", *RUNS["accumulated"][2])]
    whole.append(overrides(folder, "muon-sharded", *MUON))
    launch(folder, "sharded", [*whole, ["stop-rank-1@3", *stopped], stopped, gone_on, ["stop-rank-1@3", *begun]])
    distill(load_config(None, overrides(folder, "fsdp-ddp", *RUNS["plain"][1])), load_target(str(folder / "target")))
    return folder


def log_of(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def outcomes_of(folder, how, rank):
    """Of each run what `run_many.py` has noted of that process."""
    return [json.loads(line) for line in (folder / f"plan-{how}.rank{rank}").read_text().splitlines()]


def last_weights(folder, name):
    return load_file(max((folder / "runs" / name / "checkpoints").iterdir()) / "draft.safetensors")


def last_state(folder, name):
    """Weights and moments."""
    path = max((folder / "runs" / name / "checkpoints").iterdir()) / "training.pt"
    return last_weights(folder, name), torch.load(path, weights_only=True)["optimizers"]


def test_the_launcher_really_started_that_many_processes(launched):
    folder, count = launched
    for rank in range(count):
        outcomes = [run["outcome"] for run in outcomes_of(folder, count, rank)]
        assert outcomes[:4] == [f"{how} of {count}" for how in ("finished", "finished", "stopped", "finished")]
    assert not (folder / f"plan-{count}.rank{count}").exists()


def test_a_tracked_run_is_one_offline_run_of_wandb(launched):
    folder, count = launched
    logs = [log.read_bytes() for log in (folder / "wandb").glob("offline-run-*/run-*.wandb")]
    assert sum(f"plain-{count}".encode() in log for log in logs) == 1


def test_rows_that_are_not_prepared_yet_are_prepared_by_one_process_for_all(launched):
    folder, count = launched
    prepared = [[run["has_prepared"] for run in outcomes_of(folder, count, rank)] for rank in range(count)]
    assert [sum(of_run) for of_run in zip(*prepared, strict=True)] == [1] + [0] * (len(prepared[0]) - 1)
    assert not list(folder.glob(".data-*-partial-*"))
    for split in ("train", "validation"):
        ours, theirs = (load_rows(folder / name, split) for name in (f"data-{count}", "data"))
        assert ours.to_list() == theirs.to_list()


@pytest.mark.parametrize("how", [2, pytest.param(3, marks=pytest.mark.slow), "sharded"])
def test_gradients_are_reduced_once_in_each_optimizer_step(request, how):
    """Of two micro-steps too; of 25 rows in steps of 12, one step of each epoch has a single one."""
    request.getfixturevalue({2: "two", 3: "three"}.get(how, how))
    folder = request.getfixturevalue("folder")
    for rank in range(3 if how == 3 else 2):
        runs = outcomes_of(folder, how, rank)
        assert [1, 1, 2, 2, 2, 2] in [sorted(run["backwards"]) for run in runs]
        for run in runs:
            assert run["reductions"] == [1] * len(run["backwards"])


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


def test_each_process_holds_half_of_a_sharded_draft_and_of_its_moments(sharded):
    whole, _, _, _, muon_whole, _ = (run["num_held"] for run in outcomes_of(sharded, 2, 0))
    ranks = [outcomes_of(sharded, "sharded", rank) for rank in range(2)]
    assert [run["outcome"] for run in ranks[0]] == [
        f"{how} of 2" for how in ("finished", "finished", "stopped", "finished", "finished", "stopped")
    ]
    held = ([run["num_held"] for run in runs] for runs in ranks)
    for first, second, expected in zip(*held, [whole, muon_whole, *4 * [whole]], strict=True):
        assert first + second == expected and abs(first - second) < expected / 100


# Muon orthogonalises in bfloat16, where the order of a sum shows.
@pytest.mark.parametrize(
    ("name", "expected", "tolerance"),
    [
        ("accumulated-sharded", "accumulated-2", 1e-6),
        ("ddp-fsdp", "plain-2", 1e-6),
        ("fsdp-ddp", "plain-1", 2e-3),
        ("muon-sharded", "muon-2", 2e-3),
    ],
)
def test_a_sharded_draft_is_trained_as_a_whole_one_also_on_from_a_checkpoint_of_the_other(
    sharded, name, expected, tolerance
):
    found, whole = log_of(sharded, name), log_of(sharded, expected)
    assert [(r["kind"], r["step"]) for r in found] == [(r["kind"], r["step"]) for r in whole]
    for a, b in zip(found, whole, strict=True):
        assert a.get("num_rows") == b.get("num_rows")
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=tolerance / 10)
        assert a.get("grad_norm", 0) == pytest.approx(b.get("grad_norm", 0), rel=tolerance)
    torch.testing.assert_close(last_weights(sharded, name), last_weights(sharded, expected), atol=tolerance, rtol=0)


def test_a_sharded_run_goes_on_exactly(sharded):
    torch.testing.assert_close(
        last_state(sharded, "stopped-sharded"), last_state(sharded, "accumulated-sharded"), atol=0, rtol=0
    )


def test_fsdp_settings_that_a_draft_is_not_sharded_by_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match=r"fsdp_version: 1, but a draft is sharded with 2; .*fsdp\.yaml"):
        start_processes(load_config(None, []), tmp_path)
