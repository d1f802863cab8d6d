"""All strategies in one run: what each row says, against what is known of decoding; and what is refused."""

import json
from dataclasses import replace

import pytest
import tiny
import torch

import draftwood as dw
from draftwood.decode.benchmark_strategies import benchmark_decode, check_settings, default_strategies
from draftwood.decode.measure import Outcome
from draftwood.decode.prompts import Prompt, PromptSet
from draftwood.decode.propose import resolve_tree
from draftwood.decode.propose.plan import Plan
from draftwood.decode.report import TRANSFORMERS
from draftwood.decode.stats import FAULT_FORWARDS, ForwardStats, RowStats
from draftwood.decode.strategy_table import is_chain, make_table
from draftwood.models.language_draft import LanguageDraft
from draftwood.models.medusa import MedusaDraft

PROMPTS = PromptSet("three", [Prompt(f"p{i}", tiny.prompt_ids((1, n), n)) for i, n in enumerate((5, 2, 9))])


@pytest.fixture(scope="module")
def twin():
    """The target as its own draft: nothing that it drafts likeliest, or draws, is wrong."""
    target = tiny.target("llama")
    return target, LanguageDraft(target, target)


def rows_of(result, number=0):
    return {(row.strategy, row.dtype): row for row in result.tables[number].rows}


def test_the_default_strategies_all_run_and_a_perfect_draft_keeps_every_level(twin):
    result = benchmark_decode({"float32": twin}, [PROMPTS], max_new_tokens=11)
    greedy, sampled = rows_of(result, 0), rows_of(result, 1)
    names = {name for name, _ in sampled}
    assert names == {TRANSFORMERS, *default_strategies(twin[1])} and len(names) == 14
    assert names - {name for name, _ in greedy} == {"sampled-1x4", "sampled-3x4", "sampled-4-2-1-1"}
    for rows in (greedy, sampled):
        assert rows["autoregressive", "float32"].acceptance_length == 1
        assert rows[TRANSFORMERS, "float32"].acceptance_length is rows[TRANSFORMERS, "float32"].shares is None
        for name, row in rows.items():
            assert row.tokens_per_s > 0 and (row.num_identical == 3 if rows is greedy else row.num_identical is None)
            assert row.shares is None or sum(row.shares.values()) == pytest.approx(1), name
        best = max(rows[name, "float32"].tokens_per_s for name in (TRANSFORMERS, "autoregressive"))
        assert all(row.ratio == pytest.approx(row.tokens_per_s / best) for row in rows.values())
    assert greedy["chain-4", "float32"].acceptance_length > 2.5 < sampled["sampled-1x4", "float32"].acceptance_length


def test_every_strategy_runs_in_every_dtype_and_is_compared_with_transformers_in_the_same(twin):
    other = dw.load_target(tiny.build("llama", seed=1))  # in the place of a dtype that changes every output
    models = {"float32": twin, "bfloat16": (other, LanguageDraft(other, other))}
    result = benchmark_decode(models, [PROMPTS], strategies=["chain-2"], temperatures=[0.0], max_new_tokens=6)
    rows = rows_of(result)
    assert set(rows) == {(name, d) for name in (TRANSFORMERS, "autoregressive", "chain-2") for d in models}
    assert all(row.num_identical == 3 for row in rows.values())
    assert max(rows[name, d].ratio for name, d in rows if name != "chain-2") == 1

    settings = dict(strategies=["chain-2"], temperatures=[0.0], max_new_tokens=6)
    some = benchmark_decode(models, [PROMPTS], strategy_dtypes=["bfloat16"], **settings)
    assert set(rows) - set(rows_of(some)) == {("chain-2", "float32")}
    with pytest.raises(ValueError, match="strategy dtypes float16: not among"):
        benchmark_decode(models, [PROMPTS], strategy_dtypes=["float16"], **settings)


def test_differing_prompts_shares_speeds_and_gains_are_counted_right():
    def outcome(tokens, seconds, forwards=(), timings=(0, 0, 0)):
        stats = RowStats([ForwardStats(n, n - 1, 4, False) for n in forwards])
        parts = dict(zip(("propose_s", "verify_s", "commit_s"), timings, strict=True), prefill_s=100.0)
        return Outcome(list(tokens), seconds, stats, parts)

    prompts = replace(PROMPTS, prompts=PROMPTS.prompts[:2])
    outcomes = {
        (TRANSFORMERS, "f"): [outcome("abcd", 2.0), outcome("efgh", 2.0)],
        ("autoregressive", "f"): [outcome("abcd", 1.0, [1] * 3), outcome("efgh", 3.0, [1] * 3)],
        (TRANSFORMERS, "g"): [outcome("abcd", 1.0), outcome("efgh", 1.0)],
        ("autoregressive", "g"): [outcome("abcd", 2.0, [1] * 3), outcome("efgh", 2.0, [1] * 3)],
        ("chain-4", "f"): [outcome("abcd", 0.5, [2, 2], (1, 2, 1)), outcome("efgh", 0.5, [2, 2], (1, 4, 1))],
        ("chain-2", "f"): [outcome("abcd", 1.0, [1, 2]), outcome("efgh", 1.0, [2])],
        ("stree", "f"): [outcome("abcX", 1.0, [3, 2]), outcome("efgh", 1.0, [3])],
        ("lookup", "f"): [outcome("abcd", 0.1, [9]), outcome("efgh", 0.1, [9])],
    }
    trees = {name: resolve_tree(name) for name in ("chain-4", "chain-2", "stree")}
    table = make_table(prompts, 0.0, outcomes, trees, seed=0)
    rows = {(row.strategy, row.dtype): row for row in table.rows}
    assert table.baseline == f"{TRANSFORMERS} in g"
    assert rows["chain-4", "f"].tokens_per_s == 8 and rows["chain-4", "f"].ratio == 2
    assert rows["chain-4", "f"].shares == pytest.approx({"propose": 0.2, "verify": 0.6, "commit": 0.2})
    assert rows["chain-4", "f"].num_identical == 2 and rows["stree", "f"].num_identical == 1
    assert [(g.figure, g.tree, g.chain) for g in table.gains] == [
        ("acceptance_length", "stree", "chain-4"),
        ("tokens_per_s", "stree", "chain-4"),
    ]
    assert [g.ratio for g in table.gains] == pytest.approx([8 / 3 / 2, 0.5])
    # Of the four resamples of two prompts: (3 + 2 + 3) / 3 over 4 / 2, and each prompt twice.
    assert table.gains[0].interval == pytest.approx((5 / 2 / 2, 3 / 2)) and table.gains[1].interval == (0.5, 0.5)
    assert "stree over chain-4, +33.3 % (+25.0 % to +50.0 %)" in table.notes()[1] and "-50.0 %" in table.notes()[2]


def test_a_draft_of_which_nothing_is_kept_is_called_a_fault_below_the_table():
    def outcome(accepted):
        return Outcome([1, 2], 1.0, RowStats([ForwardStats(1 + accepted, accepted, 4, True)] * FAULT_FORWARDS), {})

    outcomes = {
        (TRANSFORMERS, "f"): [Outcome([1, 2], 1.0, RowStats([]), {})],
        ("autoregressive", "f"): [Outcome([1, 2], 1.0, RowStats([ForwardStats(1, 0, 0, False)] * 99), {})],
        ("chain-4", "f"): [outcome(0)],
        ("stree", "f"): [outcome(1)],
        ("lookup", "f"): [outcome(0)],  # finds nothing to keep in some texts
    }
    trees = {name: resolve_tree(name) for name in ("chain-4", "stree")}
    table = make_table(replace(PROMPTS, prompts=PROMPTS.prompts[:1]), 0.0, outcomes, trees, seed=0)
    faults = [note for note in table.notes() if note.startswith("FAULT")]
    assert len(faults) == 1 and "chain-4 in f: acceptance length is exactly 1.00" in faults[0]


def test_an_interrupted_run_goes_on_and_other_settings_start_over(twin, tmp_path):
    settings = dict(strategies=["chain-2", "sampled-2x2"], max_new_tokens=6, journals=tmp_path, identity="weights")
    first = benchmark_decode({"float32": twin}, [PROMPTS], **settings)
    assert {path.name for path in tmp_path.iterdir()} == {"three-0.jsonl", "three-1.jsonl"}
    journal = tmp_path / "three-0.jsonl"
    lines = journal.read_text().splitlines()
    entry = json.loads(lines[1])
    entry["outcomes"]["chain-2 float32"]["seconds"] = 1e6
    journal.write_text("\n".join([lines[0], json.dumps(entry), lines[2]]) + "\n")
    resumed = benchmark_decode({"float32": twin}, [PROMPTS], **settings)
    assert rows_of(resumed)["chain-2", "float32"].tokens_per_s < 1e-3 and resumed.tables[1] == first.tables[1]
    anew = benchmark_decode({"float32": twin}, [PROMPTS], **{**settings, "identity": "others"})
    assert rows_of(anew)["chain-2", "float32"].tokens_per_s > 1e-3


def test_a_plan_runs_where_there_is_one_and_medusa_has_trees_of_its_own(twin):
    target, _ = twin
    plan = Plan(dw.Tree.chain(2), tokens_per_step=2.0, step_ms=1.0, autoregressive_ms=1.0, interval=(1.0, 3.0))
    result = benchmark_decode(
        {"float32": twin}, [PROMPTS], strategies=["plan"], plans={"float32": plan}, max_new_tokens=6
    )
    assert rows_of(result)["plan", "float32"].num_identical == 3
    assert result.settings["plans"]["float32"]["tree"] == {"parents": [-1, 0, 1]}
    medusa = MedusaDraft.from_target(target)
    assert {"medusa-63", "product-4x2x2"} <= set(default_strategies(medusa)) - set(default_strategies(twin[1]))
    assert default_strategies(None, True) == ("autoregressive", "lookup", "lookahead", "plan")


def test_chains_are_told_from_trees():
    trees = ("stree", "beam-3x4", "dynamic-8", "sampled-3x4", "sampled-1-2", "product-1x2")
    names = ("chain-3", "product-1x1", "beam-1x4", "sampled-1x4", *trees)
    chains = [name for name in names if is_chain(resolve_tree(name))]
    assert chains == ["chain-3", "product-1x1", "beam-1x4", "sampled-1x4"]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(strategies=["stre"]), "no tree 'stre'; did you mean 'stree'"),
        (dict(strategies=["autoregresive"]), "did you mean 'autoregressive'"),
        (dict(strategies=["chain-2", "chain-2"]), "chain-2: given more than once"),
        (dict(strategies=["sampled-3x4"], temperatures=[0.0]), "set one above 0"),
        (dict(strategies=["chain-2", "plan"], has_draft=False), "chain-2, plan need a draft"),
        (dict(strategies=["plan"], has_plan=False), "draftwood plan"),
        (dict(repeats=0), "repeats is 0"),
        (dict(max_new_tokens=1), "max_new_tokens is 1"),
        (dict(temperatures=[-1.0]), "temperature is -1"),
        (dict(temperatures=[]), "no temperature"),
    ],
)
def test_what_cannot_run_is_refused_by_name(settings, message):
    defaults = dict(strategies=["chain-2"], temperatures=[0.0, 1.0], max_new_tokens=8, repeats=1)
    with pytest.raises(ValueError, match=message):
        check_settings(**{**defaults, **settings})


def test_low_precision_is_a_target_of_its_own():
    target = dw.load_target(tiny.build("llama").to(torch.bfloat16))
    result = benchmark_decode({"bfloat16": (target, None)}, [PROMPTS], temperatures=[0.0], max_new_tokens=4)
    assert {row.strategy for row in result.tables[0].rows} == {TRANSFORMERS, "autoregressive", "lookup", "lookahead"}
    assert result.settings["dtype"] == ["bfloat16"] and not result.tables[0].gains
