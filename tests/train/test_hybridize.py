"""A hybrid of a tiny model: it learns, chooses layers, can be stopped at any step and goes on as if it had not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from draftwood import configs
from draftwood.cli import app
from draftwood.models.hybrid import build_hybrid
from draftwood.models.target import load_target
from draftwood.train import hybridize as hybridize_module
from draftwood.train.hybrid_stages import Distilling, Mixers, agreement
from draftwood.train.hybridize import HybridizeConfig, Hybridizer, Progress, _Shown, chosen_layers, hybridize
from draftwood.train.loop import Stopped
from draftwood.train.prepare import load_rows, prepare
from draftwood.train.token_blocks import TokenBlocks


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workshop")
    tiny_run.make(folder, count=40)
    prepare(folder / "rows.jsonl", tiny_run.tokenizer(), folder / "rows", max_length=64, num_validation=8)
    return folder


class StopAfter:
    def __init__(self, steps):
        self.steps = steps

    def is_requested(self):
        self.steps -= 1
        return self.steps == 0


def config(**changes):
    small = dict(fit_tokens=320, select_tokens=160, distil_tokens=320, length=16, batch_size=2, warmup_steps=1)
    return HybridizeConfig(**{**small, "num_auto": 1, **changes})


def hybridizer(workshop, out, settings, seen=None):
    target = load_target(str(workshop / "target"))
    rows = [load_rows(workshop / "rows", name) for name in ("train", "validation")]
    log = (lambda stage, _, figures: seen.append((stage, figures))) if seen is not None else lambda *_: None
    return Hybridizer(target, *rows, out, settings, Accelerator(), log)


def test_both_stages_bring_the_hybrid_nearer_to_the_original(workshop, tmp_path):
    seen = []
    settings = config(fit_tokens=3200, distil_tokens=3200, lr=1e-2, distil_lr=1e-2)
    assert hybridizer(workshop, tmp_path, settings, seen).run(StopAfter(-1)) is not None
    for stage in ("fit", "distil"):
        losses = [figures["loss"] for name, figures in seen if name == stage]
        assert sum(losses[-5:]) < sum(losses[:5]), stage


def test_auto_keeps_the_layer_that_changes_the_original_least(workshop, tmp_path):
    run = hybridizer(workshop, tmp_path, config())
    run.run(StopAfter(-1))
    kl = run.progress.alone_kl
    assert set(kl) == set(range(run.model.config.num_hidden_layers))
    assert run.progress.layers == [min(kl, key=kl.get)]


@pytest.mark.parametrize("steps", [3, 5, 8, 10, 13])  # in each stage, and where one ends
def test_a_stopped_run_goes_on_to_the_same_weights(workshop, tmp_path, steps):
    whole = hybridizer(workshop, tmp_path / "whole", config()).run(StopAfter(-1))
    assert hybridizer(workshop, tmp_path / "cut", config()).run(StopAfter(steps)) is None
    resumed = hybridizer(workshop, tmp_path / "cut", config()).run(StopAfter(-1))
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_only_mixers_differ_from_the_original(workshop, tmp_path):
    model = load_target(str(workshop / "target")).model
    hybrid = hybridizer(workshop, tmp_path, config()).run(StopAfter(-1))
    assert torch.equal(hybrid.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert torch.equal(hybrid.model.layers[0].feed_forward.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_the_folder_is_a_plain_model_with_its_recipe(workshop, tmp_path):
    settings = config(num_auto=0, layers=(0,))
    found = hybridize(
        str(workshop / "target"), str(workshop / "rows.jsonl"), tmp_path, settings,
        data_folder=workshop / "rows2", max_length=64, num_validation=8, num_proc=1, console=Console(quiet=True),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "bamba" and model.config.layers_block_type[0] == "linear_attention"
    record = json.loads((tmp_path / "hybrid.json").read_text())
    assert record["layers"] == [0] and record["held_out"]["kl_nats"] == found.kl
    assert load_target(str(tmp_path)).tokenizer is not None


def test_other_settings_are_refused_where_a_run_was_begun(workshop, tmp_path):
    hybridizer(workshop, tmp_path, config()).run(StopAfter(2))
    with pytest.raises(ValueError, match="was begun with lr="):
        hybridizer(workshop, tmp_path, config(lr=0.5))


def test_another_target_of_the_same_shape_is_refused_where_a_run_was_begun(workshop, tmp_path):
    hybridizer(workshop, tmp_path, config()).run(StopAfter(2))
    target = load_target(str(workshop / "target"))
    target.model.model.layers[0].mlp.up_proj.weight.data.add_(0.01)
    rows = [load_rows(workshop / "rows", name) for name in ("train", "validation")]
    with pytest.raises(ValueError, match="was begun with other target"):
        Hybridizer(target, *rows, tmp_path, config(), Accelerator(), lambda *_: None)


@pytest.mark.parametrize("changed", ["train", "validation"])
def test_other_rows_are_refused_where_a_run_was_begun(workshop, tmp_path, changed):
    hybridizer(workshop, tmp_path, config()).run(StopAfter(2))
    rows = {name: load_rows(workshop / "rows", name) for name in ("train", "validation")}
    rows[changed] = rows[changed].select(range(1, len(rows[changed])))
    with pytest.raises(ValueError, match="was begun with other rows"):
        Hybridizer(load_target(str(workshop / "target")), *rows.values(), tmp_path, config(), Accelerator(), print)


def test_a_run_begun_before_target_and_rows_were_noted_goes_on(workshop, tmp_path):
    hybridizer(workshop, tmp_path, config()).run(StopAfter(2))
    state = torch.load(tmp_path / "training.pt", weights_only=True)
    del state["identity"]["target"], state["identity"]["rows"]
    torch.save(state, tmp_path / "training.pt")
    assert hybridizer(workshop, tmp_path, config()).progress.step == 2


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"nonsense", lambda data: b""])
def test_a_damaged_state_is_named_and_may_be_deleted(workshop, tmp_path, damage):
    hybridizer(workshop, tmp_path, config()).run(StopAfter(2))
    path = tmp_path / "training.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="training.pt is damaged .* delete it"):
        hybridizer(workshop, tmp_path, config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [(dict(num_auto=99), "auto:99: the model has"), (dict(num_auto=0, layers=(0, 99)), "expected some, not all")],
)
def test_layers_that_do_not_fit_are_refused_before_anything_is_done(workshop, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        hybridize(str(workshop / "target"), "none", tmp_path / "out", config(**changes), console=Console(quiet=True))
    assert not (tmp_path / "out").exists()


def test_all_layers_are_refused(workshop):
    count = load_target(str(workshop / "target")).config.num_hidden_layers
    for changes in (dict(num_auto=count), dict(num_auto=0, layers=tuple(range(count)))):
        with pytest.raises(ValueError, match="layers"):
            config(**changes).check_model(load_target(str(workshop / "target")).model.config)
    config(num_auto=count - 1).check_model(load_target(str(workshop / "target")).model.config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("length", 0), ("save_every", 0), ("fit_tokens", -1), ("distil_tokens", -5), ("lr", 0.0),
     ("distil_lr", float("nan")), ("mixer_weight", -1.0), ("seed", -1)],
)  # fmt: skip
def test_numbers_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, expected"):
        config(**{name: value})


def test_processes_that_would_share_a_batch_unevenly_are_refused(workshop, tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 3)
    with pytest.raises(ValueError, match="batch_size is 2, expected a multiple of the 3 processes"):
        hybridizer(workshop, tmp_path, config())


@pytest.mark.parametrize(("count", "expected"), [(3, 1), (40, 4), (2500, 200)])
def test_a_tenth_of_a_small_source_is_held_out_and_200_of_a_large_one(tmp_path, count, expected):
    lines = [json.dumps(row) for row in tiny_run.conversations(count)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert hybridize_module._held_out(str(tmp_path / "rows.jsonl")) == expected


def test_rows_of_two_files_of_one_name_lie_apart(tmp_path, monkeypatch):
    names = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "rows.jsonl").touch()
        monkeypatch.chdir(folder)
        names.add(hybridize_module._rows_name("rows.jsonl", "target", 64, 8))
        names.add(hybridize_module._rows_name(str(folder / "rows.jsonl"), "target", 64, 8))
    assert len(names) == 2


def test_a_stopped_run_exits_with_130(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise Stopped(tmp_path / "training.pt")

    monkeypatch.setattr(hybridize_module, "hybridize", stop)
    found = CliRunner().invoke(app, ["hybridize", "none", "--layers", "1", "--out", str(tmp_path)])
    assert found.exit_code == 130 and "training.pt" in found.stderr


@pytest.mark.slow  # starting processes takes half a minute on two cores
def test_two_processes_train_one_hybrid(workshop, tmp_path):
    here = Path(sys.executable).parent
    launcher = [
        here / "accelerate",
        "launch",
        "--config_file",
        Path(configs.__file__).parent / "accelerate/two_processes.yaml",
    ]
    options = [
        "--layers",
        "auto:1",
        "--source",
        workshop / "rows.jsonl",
        "--data-folder",
        tmp_path / "data",
        "--length",
        16,
    ]
    tokens = ["--batch-size", 2, "--select-tokens", 160, "--fit-tokens", 320, "--distil-tokens", 320]
    command = [
        *launcher,
        here / "draftwood",
        "hybridize",
        workshop / "target",
        "--out",
        tmp_path / "out",
        *options,
        *tokens,
    ]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 20  # not those of two runs
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "bamba"


def test_a_tracker_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(ImportError, match="pip install nowhere"):
        hybridize("none", "none", tmp_path, config(), tracker="nowhere", console=Console(quiet=True))


def test_the_log_of_a_resumed_run_has_every_step_once(workshop, tmp_path):
    settings = config(num_auto=0, layers=(0,), save_every=4)
    done = {"stage": "fit", "step": 4}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"stage": "fit", "step": i}) + "\n" for i in range(9)))
    with _Shown(Console(quiet=True), Accelerator(), tmp_path / "metrics.jsonl") as shown:
        shown.start_at(Progress(**done))
        shown.log("fit", settings.fit_tokens, {"step": 5})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]


def test_the_distillation_is_kl_and_the_mixers_errors_by_a_plain_forward(workshop):
    model = load_target(str(workshop / "target")).model.requires_grad_(False)
    mixers = Mixers(model, [0])
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    found = Distilling(model, {0: mixers.mixers[0]}, mixer_weight=3.0)(ids)

    attention, given = model.model.layers[0].self_attn, []
    handle = attention.register_forward_hook(
        lambda _, args, kwargs, out: given.append((kwargs, out[0])), with_kwargs=True
    )
    wanted = model(ids, use_cache=False).logits
    handle.remove()
    hybrid = build_hybrid(model, {0: mixers.mixers[0].state_dict()})
    error = (mixers.mixers[0](given[0][0]["hidden_states"]) - given[0][1]).square().sum() / given[0][1].square().sum()
    kl = agreement(wanted, hybrid(ids, use_cache=False).logits.detach()).kl
    assert found["kl"].item() == pytest.approx(kl, rel=1e-4)
    assert found["error"].item() == pytest.approx(error.item(), rel=1e-4)
    assert found["loss"].item() == pytest.approx(kl + 3 * error.item(), rel=1e-4)


@pytest.mark.slow  # compiling takes a minute
def test_compiled_layers_give_the_same_loss_and_gradients(workshop):
    model = load_target(str(workshop / "target")).model.requires_grad_(False)
    mixers = Mixers(model, [0])
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    results = []
    for compiled in (False, True):
        mixers.zero_grad()
        loss = Distilling(model, {0: mixers.mixers[0]}, mixer_weight=1.0, compiled=compiled)(ids)["loss"]
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in mixers.parameters() if p.grad is not None)])
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-6)


def test_agreement_is_kl_in_nats_and_the_share_of_equal_choices():
    p, q = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.7, 0.1]]), torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    found = agreement((p + 1e-30).log(), q.log())
    expected = (0.5 * torch.tensor(2.0).log() + (p[1] * (p[1] / q[1]).log()).sum()) / 2
    assert found.kl == pytest.approx(expected.item(), abs=1e-6)
    assert found.top1 == 0.5


def test_blocks_are_the_shuffled_stream_and_begin_again_at_its_end(workshop):
    rows = load_rows(workshop / "rows", "train")
    blocks = TokenBlocks(rows, 16, seed=3)
    total = sum(len(row["input_ids"]) for row in rows)
    assert len(blocks) == total // 16
    assert torch.equal(blocks.batch(0, 4), blocks.blocks[:4].long())
    assert torch.equal(blocks.batch(1, len(blocks)), blocks.batch(0, len(blocks)))
    assert not torch.equal(TokenBlocks(rows, 16, seed=4).blocks, blocks.blocks)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_rows_for_a_block_are_refused(workshop, count):
    with pytest.raises(ValueError, match="the held-out rows have .* tokens, fewer than one block of 100"):
        TokenBlocks(load_rows(workshop / "rows", "train").select(range(count)), 100, 0, "held-out rows")


@pytest.mark.parametrize(("text", "expected"), [("1,3,5", ((1, 3, 5), 0)), ("auto:15", ((), 15))])
def test_layers_are_named_or_counted(text, expected):
    assert chosen_layers(text) == expected


@pytest.mark.parametrize("text", ["", "auto", "auto:0", "1,x", "half"])
def test_other_words_for_layers_are_refused(text):
    with pytest.raises(ValueError, match="expected numbers"):
        chosen_layers(text)
