"""Recipes compared at equal cost, and kept when the comparison is started again."""

import json

import numpy as np
import pytest
import tiny_run

from draftwood.decode import evaluate
from draftwood.models.target import load_target
from draftwood.train import loop
from draftwood.train.recipes import RECIPES, bootstrap, compare_recipes, recipe_config

COMPARED = ["eagle", "hass-acceptance"]


@pytest.fixture(scope="module")
def config(workshop):
    return tiny_run.config(workshop, "loop.epochs=1", "draft.draft_vocab_size=32", "evaluate.max_new_tokens=6")


@pytest.fixture(scope="module")
def compare(workshop, config):
    target = load_target(str(workshop / "target"))
    return lambda: compare_recipes(config, (0, 1), COMPARED, ["chain-2", "dynamic-8"], target)


@pytest.fixture(scope="module")
def first(compare):
    return compare()


@pytest.fixture
def runs(workshop, first):
    return workshop / "draft-recipes"


def test_recipes_are_trained_and_decoded_with_every_seed_and_tree(first, runs):
    assert {(f["recipe"], f["tree"]) for f in first.figures()} == {(r, t) for r in COMPARED for t in first.counts}
    assert all(counts.shape == (2, 2, 5, 2) for counts in first.counts.values())
    assert all(len(f["top1"]) == 3 and len(f["acceptance_length_by_seed"]) == 2 for f in first.figures())
    saved = json.loads(first.save(runs).read_text())
    assert saved["figures"] == first.figures() and saved["settings"]["align"]["eagle"]["steps"] == 1
    assert "hass-acceptance" in str([c._cells for c in first.table().columns])


def test_runs_differ_in_nothing_but_the_recipe_and_share_one_cache(first, runs):
    logs = {path.parent.name: path.read_text().splitlines() for path in runs.glob("*/metrics.jsonl")}
    assert len(logs) == 4
    steps = {name: [r["num_rows"] for r in map(json.loads, log) if r["kind"] == "train"] for name, log in logs.items()}
    for seed in (0, 1):  # the same supervised rows in every optimizer step
        assert len({tuple(rows) for name, rows in steps.items() if name.endswith(f"-{seed}")}) == 1
    assert {sum(rows) for rows in steps.values()} == {first.settings["supervised_rows"]}
    assert [path.parent for path in runs.rglob("features")] == [runs]


def test_recipes_change_the_align_section_alone(config, runs):
    for recipe in RECIPES:
        made = recipe_config(config, recipe, 0, runs)
        same = {"align": config.align, "name": config.name, "output": config.output}
        assert made.model_copy(update=same) == config


def test_started_again_it_trains_and_decodes_nothing(compare, first, monkeypatch):
    monkeypatch.setattr(loop, "_train_step", None)
    monkeypatch.setattr(evaluate, "generate", None)
    assert compare().figures() == first.figures()


def test_the_interval_covers_seeds_and_prompts():
    same = np.tile([6, 3], (2, 3, 5, 1))
    values, drawn = bootstrap(same)
    assert (values == 2).all() and np.allclose(drawn, 2)
    by_seed = np.array([[[[2, 1]] * 4, [[4, 1]] * 4]])  # the prompts agree, the seeds do not
    assert set(np.unique(bootstrap(by_seed)[1].round(9))) == {2, 3, 4}
    by_prompt = np.array([[[[2, 1], [4, 1]]] * 3])
    assert set(np.unique(bootstrap(by_prompt)[1].round(9))) == {2, 3, 4}
    weighted = np.array([[[[9, 3], [1, 1]]]])  # of all forwards, not a mean over prompts
    assert bootstrap(weighted)[0] == 2.5


def test_differences_are_of_the_same_draws():
    random = np.random.default_rng(1)
    forwards = random.integers(3, 9, (1, 3, 20, 1))
    one = np.concatenate([forwards * 2, forwards], -1)
    _, drawn = bootstrap(np.concatenate([one, one + forwards * [1, 0]]))
    assert np.allclose(drawn[:, 1] - drawn[:, 0], 1)


def test_an_unknown_recipe_is_named(config):
    with pytest.raises(ValueError, match="no recipe haas; known: eagle, hass-no-topk"):
        compare_recipes(config, [0], ["haas"])
