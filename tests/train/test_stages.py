"""Runs of several stages: what holds when, schedules, and going on exactly wherever they were stopped."""

from pathlib import Path

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from tiny_run import log_of

from draftwood.configs.load import load_config
from draftwood.train import loop
from draftwood.train.loop import distill
from draftwood.train.optim import schedule
from draftwood.train.stages import measured_config, plan_stages

TWO = "stages=[{epochs: 2, align: {steps: 1, topk_weight: 0.0}}, {epochs: 1, optimizer: {lr: 0.002}}]"


@pytest.fixture
def make_config(workshop, tmp_path):
    return lambda *overrides: tiny_run.config(workshop, f"output={tmp_path}", "loop.epochs=1", *overrides)


def last_weights(config):
    folder = Path(config.output) / config.name / "checkpoints"
    return load_file(max(folder.iterdir()) / "draft.safetensors")


def spans(config, steps_per_epoch=6):
    return [(s.start, s.end, s.schedule_start, s.schedule_end) for s in plan_stages(config, steps_per_epoch)]


def test_a_stage_with_another_optimizer_has_a_schedule_of_its_own_and_one_without_shares_it(make_config):
    assert spans(make_config(TWO)) == [(0, 12, 0, 12), (12, 18, 12, 18)]
    assert spans(make_config("stages=[{align: {steps: 1}}, {}]")) == [(0, 6, 0, 12), (6, 12, 0, 12)]
    assert spans(make_config(TWO, "loop.max_steps=14")) == [(0, 12, 0, 12), (12, 14, 12, 14)]
    assert spans(make_config(TWO, "loop.max_steps=9")) == [(0, 9, 0, 9)]
    assert spans(make_config()) == [(0, 6, 0, 6)]


def test_validation_measures_by_the_last_stage_of_the_most_align_steps(make_config):
    stages = plan_stages(make_config(TWO), 6)
    assert measured_config(stages).align.topk_weight == 1.0
    falling = "stages=[{align: {topk_weight: 0.5}}, {align: {steps: 1}}]"
    assert measured_config(plan_stages(make_config(falling), 6)).align.topk_weight == 0.5


def test_each_step_follows_the_settings_of_its_stage(make_config, target):
    config = make_config(TWO, "loop.evaluate_every=9")
    distill(config, target)
    first, second = config.stage_configs()
    records = log_of(config)
    assert [len(record["align"]) for record in records] == [1] * 12 + [3] * 6
    expected = [schedule(i, 12, first.optimizer) for i in range(12)] + [
        schedule(i, 6, second.optimizer) for i in range(6)
    ]
    assert [record["lr_factor"] for record in records] == pytest.approx(expected)
    for record, align in zip(records, [first.align] * 12 + [second.align] * 6, strict=True):
        terms = [a["feature"] + 0.1 * a["ce"] + align.topk_weight * a["topk"] for a in record["align"]]
        assert record["loss"] == pytest.approx(sum(terms))
    for record in log_of(config, "validation"):
        terms = [a["feature"] + 0.1 * a["ce"] + a["topk"] for a in record["align"]]
        assert len(terms) == 3 and record["loss"] == pytest.approx(sum(terms))


def test_a_second_stage_is_a_run_that_starts_from_the_draft_of_the_first(make_config, target):
    """As the method was published: two runs, the second from the draft of the first."""
    both = make_config("name=both", "align.feature_noise=0.0", TWO)
    distill(both, target)
    first = make_config(
        "name=first", "align.feature_noise=0.0", "loop.epochs=2", "align.steps=1", "align.topk_weight=0"
    )
    distill(first, target)
    at_the_change = {r["step"]: r["loss"] for r in log_of(both)}
    assert [r["loss"] for r in log_of(first)] == [at_the_change[step] for step in range(1, 13)]
    moments = torch.load(
        max((Path(both.output) / "both" / "checkpoints").iterdir()) / "training.pt", weights_only=True
    )["optimizers"]
    assert {int(entry["step"]) for entry in moments[0]["state"].values()} == {6}, "fresh moments in the second stage"


@pytest.mark.parametrize(("killed_at", "second"), [(6, "{lr: 0.002}"), (7, "{name: muon}"), (5, "{}")])
def test_killed_around_the_change_of_stage_and_resumed_is_an_uninterrupted_run(
    make_config, target, monkeypatch, killed_at, second
):
    stages = TWO.replace("{lr: 0.002}", second).replace("epochs: 2", "epochs: 1")
    whole, killed = (make_config(f"name={name}", stages, "loop.save_every=3") for name in ("whole", "killed"))
    train_step = loop._train_step

    def stepping(run, numbers, position, meter):
        if position.step == killed_at:
            raise MemoryError
        return train_step(run, numbers, position, meter)

    distill(whole, target)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_train_step", stepping)
        with pytest.raises(MemoryError):
            distill(killed, target)
    distill(killed, target)
    for name, tensor in last_weights(whole).items():
        assert torch.equal(tensor, last_weights(killed)[name]), name
    for kind in ("train", "validation"):
        a, b = ([(r["step"], r["loss"]) for r in log_of(config, kind)] for config in (whole, killed))
        assert a == b


SMALL = [
    "target.dtype=auto",
    "data.limit=null",
    "loop.max_steps=null",
    "data.train_tokens=null",
    "draft.draft_vocab_size=null",
    "features.source=online",
]


@pytest.mark.parametrize(
    ("recipe", "shorter", "steps"),
    [
        ("hass", ["stages.0.epochs=1", "stages.1.epochs=1"], [3, 3]),
        ("eagle", ["loop.epochs=1"], [1]),
        ("eagle3", ["loop.epochs=1", "draft.taps=[0, 1]"], [7]),
        ("quickstart", ["stages.0.epochs=1", "stages.1.epochs=1"], [1, 3]),
    ],
)
def test_the_recipe_runs_at_the_size_of_a_test(workshop, target, tmp_path, recipe, shorter, steps):
    base = [x for x in tiny_run.overrides_for(workshop) if not x.startswith(("loop.epochs", "optimizer"))]
    config = load_config(recipe, [*base, f"output={tmp_path}", *SMALL, *shorter])
    distill(config, target)
    records = log_of(config)
    assert [len(records[i]["align"]) for i in range(0, len(records), 6)] == steps
    assert all(torch.isfinite(torch.tensor(record["loss"])) for record in records)
