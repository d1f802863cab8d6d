"""What long runs meet: damaged checkpoints, Ctrl-C before there is anything to save; plans, trackers, decoding."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import log_of

from draftwood.configs.load import load_config
from draftwood.train import run as run_module
from draftwood.train.checkpoints import Checkpoints, OldCheckpoint
from draftwood.train.launch import main
from draftwood.train.loop import ResumeError, Stopped, distill
from draftwood.train.mask_view import mask_view
from draftwood.train.summary import dry_run


@pytest.fixture
def make_config(workshop, tmp_path):
    return lambda *overrides: tiny_run.config(workshop, f"output={tmp_path}", "loop.epochs=1", *overrides)


def run_folder(config):
    return Path(config.output) / config.name


def cut_off(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def finished(workshop, target, tmp_path_factory):
    """The folder of a run of 6 steps with checkpoints of the last two pairs."""
    config = tiny_run.config(
        workshop, f"output={tmp_path_factory.mktemp('runs')}", "loop.epochs=1", "loop.save_every=2"
    )
    distill(config, target)
    return run_folder(config)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("training.pt", cut_off),
        ("draft.safetensors", flip_a_bit),
        ("draft.safetensors", Path.unlink),
        ("SHA256SUMS", cut_off),
    ],
)
def test_a_damaged_latest_checkpoint_is_set_aside_and_the_one_before_it_gives_the_same_run(
    make_config, target, finished, capsys, file, damage
):
    config = make_config("loop.save_every=2")
    shutil.copytree(finished, run_folder(config))
    folder = run_folder(config) / "checkpoints"
    saved = load_file(folder / "step-00000006" / "draft.safetensors")
    whole = {name: tensor.clone() for name, tensor in saved.items()}  # not the file's memory
    damage(folder / "step-00000006" / file)
    distill(config, target)
    assert "step-00000006 is damaged" in capsys.readouterr().err
    for name, tensor in load_file(folder / "step-00000006" / "draft.safetensors").items():
        assert torch.equal(tensor, whole[name]), name
    assert sorted(path.name for path in folder.iterdir()) == [
        "damaged-step-00000006",
        "step-00000004",
        "step-00000006",
    ]


def test_no_whole_checkpoint_is_an_error_that_says_what_to_do(make_config, target, finished):
    config = make_config()
    shutil.copytree(finished, run_folder(config))
    for checkpoint in (run_folder(config) / "checkpoints").iterdir():
        cut_off(checkpoint / "training.pt")
    with pytest.raises(
        ResumeError, match="step-00000004, step-00000006 damaged.*delete .* to start anew, or take draft.init_from"
    ):
        distill(config, target)


def test_a_checkpoint_of_an_older_version_is_called_old_and_stays(make_config, target, finished):
    config = make_config()
    shutil.copytree(finished, run_folder(config))
    checkpoint = max((run_folder(config) / "checkpoints").iterdir())
    state = torch.load(checkpoint / "training.pt", weights_only=True)
    torch.save({key: value for key, value in state.items() if key != "format"}, checkpoint / "training.pt")
    names = ("draft.safetensors", "training.pt")
    sums = [f"{sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (checkpoint / "SHA256SUMS").write_text("".join(sums))
    for _ in range(2):  # without a number, then without sums too
        with pytest.raises(OldCheckpoint, match="step-00000006 is of another version .* draft.init_from="):
            distill(config, target)
        (checkpoint / "SHA256SUMS").unlink(missing_ok=True)
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["step-00000004", "step-00000006"]


def test_killed_while_it_saves_a_run_goes_on_from_the_checkpoint_before(make_config, target, finished, monkeypatch):
    config = make_config("loop.save_every=2")
    shutil.copytree(finished, run_folder(config))
    folder = run_folder(config) / "checkpoints"
    shutil.rmtree(folder / "step-00000006")
    save = torch.save

    def save_and_die(*arguments):
        save(*arguments)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save_and_die)
        with pytest.raises(MemoryError):
            distill(config, target)
    assert Checkpoints(run_folder(config), keep=2).steps() == [folder / "step-00000004"]
    distill(config, target)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["prepare_rows", "load_splits", "build_draft"])
def test_asked_to_stop_before_the_first_step_it_stops_and_loses_nothing(
    make_config, target, monkeypatch, number, where
):
    config = make_config("loop.max_steps=1")
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        work = getattr(run_module.setup, where)

        def interrupted(*arguments, **options):
            found = work(*arguments, **options)
            signal.raise_signal(number)
            return found

        patch.setattr(run_module.setup, where, interrupted)
        with pytest.raises(Stopped, match="before training; what is prepared stays. Run the same command"):
            distill(config, target)
    assert signal.getsignal(number) is before
    assert (distill(config, target) / "draft.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_process_that_is_interrupted_while_it_prepares_says_one_line(workshop, tmp_path, number):
    """A real one, with workers, on rows that take longer to prepare than it is given."""
    rows = tmp_path / "rows.jsonl"
    line = (workshop / "rows.jsonl").read_text().splitlines()[0]
    rows.write_text("\n".join(line.replace('"c0"', f'"c{i}"') for i in range(60_000)))
    overrides = [*tiny_run.overrides_for(workshop), f"output={tmp_path}", f"data.source={rows}", "data.num_proc=2"]
    overrides.append(f"data.folder={tmp_path}/data")
    process = subprocess.Popen(
        [sys.executable, "-m", "draftwood.train", *overrides],
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".data-partial-*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal sends it, to the workers too
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("stopped before training")


def test_a_dry_run_prints_the_plan_and_the_mask_and_writes_nothing(make_config, target, workshop, tmp_path):
    config = make_config(
        f"data.folder={tmp_path}/rows", "stages=[{align: {steps: 1}}, {optimizer: {lr: 0.002}}]", "features.max_gb=1"
    )
    console = Console(record=True, width=200)
    dry_run(config, target, console)
    text = console.export_text()
    for part in (
        "frozen", "tied", "trained", "24 of", "5 held out", "12 of the optimizer", "from step 0 ", "from step 6 ",
        "1 align step; 1 feature + 0.1 cross-entropy + 1 Top-10; adamw 0.01, linear over steps 0 to 6",
        "3 align steps; ", "memory", "disk", "tokens of 24 rows", "⟦",
    ):  # fmt: skip
        assert part in text, part
    assert list(tmp_path.iterdir()) == []


def test_the_plan_names_the_terms_of_each_stage_and_how_much_the_draft_can_say(make_config, target):
    acceptance = "{acceptance_weight: 1, acceptance_eta: 3, ce_weight: 0, topk_weight: 0, feature_weight: 0.5}"
    stages = f"stages=[{{align: {{detach: false, feature_weight: 0, topk: 5}}}}, {{align: {acceptance}}}]"
    console = Console(record=True, width=200)
    dry_run(make_config(stages, "draft.draft_vocab_size=40"), target, console)
    text = console.export_text()
    assert "3 align steps, gradients through them; 0.1 cross-entropy + 1 Top-5; adamw" in text
    assert "3 align steps; 0.5 feature + 1 acceptance (eta 3); adamw" in text
    assert re.search(r"for 40 of its tokens, 9\d\.\d\d% of those in the replies of the rows", text)


def test_a_dry_run_is_an_option_of_the_command_line(workshop, tmp_path, capsys):
    main(["--dry-run", *tiny_run.overrides_for(workshop), f"output={tmp_path}/runs", f"data.folder={tmp_path}/rows"])
    assert "trained to be predicted" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_mask_view_colours_what_is_trained_and_brackets_the_replies():
    tokenizer = tiny_run.tokenizer()
    ids = tokenizer("w1 w2 w3 w4 w5 w6 w7 w8", add_special_tokens=False).input_ids
    view = mask_view(ids, np.array([0, 0, 1, 1, 1, 0, 1, 1], bool), tokenizer)
    assert view.plain.splitlines() == ["8 tokens, 3 of them trained to be predicted", "w1 w2⟦w3w4 w5⟧w6⟦w7w8⟧"]
    colours = {view.plain[s.start : s.end]: s.style for s in view.spans if s.style != "bold"}
    assert colours == {
        "w1 w2": "dim", "w3": "yellow", "w4 w5": "bold green", "w6": "dim", "w7": "yellow", "w8": "bold green",
    }  # fmt: skip
    assert "6 tokens more" in mask_view(ids, [0] * 8, tokenizer, max_tokens=2).plain


def test_tensorboard_gets_settings_and_metrics(make_config, target):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = make_config("loop.max_steps=2", "loop.tracker=tensorboard", "stages=[{epochs: 1}]")
    distill(config, target)
    (folder,) = {
        path.parent for path in run_folder(config).rglob("events.out.tfevents.*") if path.parent.name == "draftwood"
    }
    events = accumulator.EventAccumulator(str(folder)).Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([record["loss"] for record in log_of(config, "train")])
    assert {"train/top3_2", "train/grad_norm", "train/rows_per_second", "train/peak_memory_gb"} <= set(
        events.Tags()["scalars"]
    )
    assert events.Scalars("validation/acceptance_length")[0].value >= 1.0


def test_decoding_while_training_is_logged_and_changes_no_weight(make_config, target, tmp_path):
    options = ["evaluate.num_prompts=2", "evaluate.max_new_tokens=6", "evaluate.tree=chain-2"]
    with_it = make_config("name=with", "loop.decode_every=4", *options)
    without = make_config("name=without", *options)
    a, b = (load_file(distill(config, target) / "draft.safetensors") for config in (with_it, without))
    assert all(torch.equal(a[name], b[name]) for name in b)
    records = log_of(with_it, "decode")
    assert [record["step"] for record in records] == [4, 6]
    assert all(record["num_prompts"] == 2 and 1 <= record["acceptance_length"] <= 3 for record in records)
    assert not log_of(without, "decode")
    shutil.rmtree(tmp_path / "with")


def test_memory_and_rates_are_in_the_log(make_config, target):
    config = make_config("loop.max_steps=1")
    distill(config, target)
    (record,) = log_of(config, "train")
    assert record["peak_memory_gb"] > 0.1 and record["rows_per_second"] > 0 and record["grad_norm"] > 0


def test_what_a_run_keeps_says_how_it_came_about(make_config, target):
    config = make_config("loop.max_steps=2", "loop.save_every=1")
    distill(config, target)
    described = sorted(run_folder(config).rglob("draft.json"))
    assert len(described) == 3
    for path in described:
        provenance = json.loads(path.read_text())["provenance"]
        assert load_config(None) != config and provenance["config"] == config.model_dump(mode="json")
        assert provenance.keys() >= {"git", "versions", "argv"}
