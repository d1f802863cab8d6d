"""Several drafts in one run, a journal that lets it go on, and their table."""

import json
from types import SimpleNamespace

import pytest
import tiny
import torch

import draftwood as dw
from draftwood.decode.compare import compare_drafts, compare_trees
from draftwood.decode.evaluate import evaluate, evaluate_drafts
from draftwood.decode.prompts import Prompt, PromptSet
from draftwood.decode.report import LOOP, SPECULATIVE, TRANSFORMERS
from draftwood.models.language_draft import LanguageDraft


@pytest.fixture
def target():
    return tiny.target("bamba")


@pytest.fixture
def prompts():
    return PromptSet("three", [Prompt(f"p{i}", tiny.prompt_ids((1, n), n)) for i, n in enumerate((5, 2, 9))])


def drafts_of(target, seeds=(0, 1)):
    made = {}
    for seed in seeds:
        torch.manual_seed(seed)
        made[f"seed {seed}"] = dw.EagleDraft.from_target(target).eval()
    return made


def test_each_draft_gets_the_report_it_gets_alone(target, prompts):
    drafts = drafts_of(target)
    together = evaluate_drafts(target, drafts, prompts, tree="stree", max_new_tokens=16)
    for name, draft in drafts.items():
        alone = evaluate(target, draft, prompts, tree="stree", max_new_tokens=16)
        assert together[name].acceptance == alone.acceptance
        assert together[name].num_identical == alone.num_identical == 3
        assert together[name].tokens_per_s.keys() == {SPECULATIVE, LOOP, TRANSFORMERS}
    first, second = together.values()
    assert first.tokens_per_s[LOOP] == second.tokens_per_s[LOOP], "the baselines were run once for all"


def test_an_interrupted_evaluation_goes_on_where_it_was(target, prompts, tmp_path):
    journal, drafts = tmp_path / "journal.jsonl", drafts_of(target)
    settings = dict(tree="chain-2", max_new_tokens=8, journal=journal, identity="weights")

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_drafts(target, drafts, prompts, **settings, on_prompt=stop)
    kept = journal.read_text().splitlines()
    assert len(kept) == 3  # what is measured, and two prompts
    journal.write_text("\n".join(kept) + '\n{"prompt": 2, "outc')  # killed in mid-line
    reports = evaluate_drafts(target, drafts, prompts, **settings)
    saved = [json.loads(line) for line in kept[1:]]
    assert [p.seconds[SPECULATIVE] for p in reports["seed 0"].prompts[:2]] == [
        entry["outcomes"][f"{SPECULATIVE}: seed 0"]["seconds"] for entry in saved
    ]
    assert len([json.loads(line) for line in journal.read_text().splitlines()]) == 4, "every line whole again"
    fresh = evaluate_drafts(target, drafts, prompts, tree="chain-2", max_new_tokens=8)
    assert reports["seed 1"].acceptance == fresh["seed 1"].acceptance


def test_outcomes_of_other_drafts_or_settings_are_not_taken_over(target, prompts, tmp_path):
    journal, drafts = tmp_path / "journal.jsonl", drafts_of(target)
    evaluate_drafts(target, drafts, prompts, tree="chain-2", max_new_tokens=8, journal=journal, identity="a")
    for changed in (dict(identity="b"), dict(identity="a", max_new_tokens=7), dict(identity="a", tree="chain-1")):
        before = journal.read_text()
        settings = {"tree": "chain-2", "max_new_tokens": 8, **changed}
        evaluate_drafts(target, drafts, prompts, **settings, journal=journal)
        assert journal.read_text() != before


def test_a_journal_that_is_none_is_named(target, prompts, tmp_path):
    journal = tmp_path / "journal.jsonl"
    journal.write_text("hello\n")
    with pytest.raises(ValueError, match=r"journal\.jsonl: not a journal"):
        evaluate_drafts(target, drafts_of(target), prompts, max_new_tokens=4, journal=journal)


def test_the_table_of_a_comparison(target, prompts, tmp_path):
    settings = SimpleNamespace(tree="stree", max_new_tokens=12, temperature=0.0)
    comparison = compare_drafts(target, drafts_of(target), prompts, settings, tmp_path)
    saved = json.loads(comparison.save(tmp_path).read_text())
    for name, report in comparison.reports.items():
        figures = saved[name]
        assert set(figures) == {"acceptance_length", "interval", "tokens_per_second", "speedup", "identical"}
        assert figures["acceptance_length"] == report.acceptance.acceptance_length
        assert figures["interval"][0] <= figures["acceptance_length"] <= figures["interval"][1]
        assert figures["identical"] is True
    markdown = (tmp_path / "report.md").read_text()
    assert "| acceptance length |" in markdown and "| seed 0 | seed 1 |" in markdown


def test_trees_of_one_draft_are_compared_with_the_first_on_the_same_prompts(target, prompts, tmp_path):
    draft = LanguageDraft(target, target)
    trees = {"short": "sampled-1x1", "long": "sampled-1x3"}
    settings = dict(max_new_tokens=13, temperature=1.0, baseline=False)
    comparison = compare_trees(target, draft, trees, prompts, **settings)
    saved = json.loads(comparison.save(tmp_path, "trees").read_text())
    alone = {name: evaluate(target, draft, prompts, tree=tree, **settings) for name, tree in trees.items()}
    lengths = {name: report.acceptance.acceptance_length for name, report in alone.items()}
    assert {name: saved[name]["acceptance_length"] for name in trees} == lengths
    assert saved["short"]["identical"] is None, "sampled outputs were not compared"
    (against,) = saved["differences"].values()
    assert against["against"] == "short" and against["ratio"] == pytest.approx(lengths["long"] / lengths["short"])
    low, high = against["ratio_interval"]
    assert 1 < low <= against["ratio"] <= high
    markdown = (tmp_path / "trees.md").read_text()
    assert f"| paired ratio to short, 95 % interval |  | {against['ratio']:.3f} ({low:.3f} to {high:.3f}) |" in markdown
    assert "LanguageDraft" in comparison.caption() and "without drafts" not in comparison.caption()
