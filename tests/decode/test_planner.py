"""Plans from measured acceptance and given costs, and decoding by them."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

import draftwood as dw
from draftwood.decode import planner
from draftwood.decode.acceptance import LEVELS, RANKS, Observation, acceptance_table, dynamic_tokens, observe, wide_tree
from draftwood.decode.cost import Costs, measure_costs
from draftwood.decode.optimal_tree import best_tree, expected_tokens
from draftwood.decode.planner import make_plan
from draftwood.decode.propose import DynamicTree, JoinedTree, Plan, make_proposer
from draftwood.decode.propose.adaptive import Adaptation, AdaptiveProposer, Depth
from draftwood.decode.propose.dynamic import DynamicProposer
from draftwood.decode.propose.plan import load_plan
from draftwood.decode.propose.static import StaticProposer

CHEAP = Costs(10.0, [(2, 10.0), (64, 12.0)], (0.1, 0.1, 0.0), (0.1, 0.1))
DEAR = Costs(10.0, [(2, 10.0), (64, 200.0)], (5.0, 5.0, 1.0), (5.0, 5.0))


@pytest.fixture
def model(targets):
    torch.manual_seed(0)
    return targets("bamba"), dw.EagleDraft.from_target(targets("bamba")).eval()


@pytest.fixture
def prompts_of(tiny):
    return [tiny.prompt_ids((1, n), n) for n in (4, 6, 8)]


def planned(model, prompts, costs, monkeypatch):
    monkeypatch.setattr(planner, "measure_costs", lambda models, *_, **__: {name: costs for name in models})
    return make_plan({"float32": model}, prompts, max_new_tokens=14)


def test_a_plan_is_saved_loaded_and_followed_without_changing_the_text(model, prompts_of, monkeypatch, tmp_path, tiny):
    planning = planned(model, prompts_of, CHEAP, monkeypatch)
    assert "speculate in float32" in planning.verdict()
    plan = load_plan(planning.save(tmp_path).parent, "float32")
    made = planning.plans["float32"]
    assert plan.to_dict() == json.loads(json.dumps(made.to_dict()))
    assert plan.interval[0] <= plan.speedup <= plan.interval[1] and plan.is_worthwhile
    out = dw.generate(*model, prompts_of[0], max_new_tokens=24, tree=plan)
    assert out.tokens[0] == tiny.greedy(model[0].model, prompts_of[0], 24)
    assert any(forward.depth for forward in out.rows[0].forwards)
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        load_plan(tmp_path, "bfloat16")
    with pytest.raises(FileNotFoundError, match="draftwood plan"):
        load_plan(tmp_path / "elsewhere", "float32")


def test_the_lookup_of_a_tree_that_two_dtypes_chose_is_decoded_once(model, prompts_of, monkeypatch):
    monkeypatch.setattr(planner, "measure_costs", lambda models, *_, **__: dict.fromkeys(models, CHEAP))
    seen, said = [], []
    real = planner.observe
    monkeypatch.setattr(planner, "observe", lambda *args, **rest: seen.append(args[3]) or real(*args, **rest))
    planning = make_plan({"a": model, "b": model}, prompts_of, max_new_tokens=14, on_progress=said.append)
    joined = [tree for tree in seen if isinstance(tree, JoinedTree)]
    assert planning.plans["a"].to_dict() == planning.plans["b"].to_dict()
    assert len(joined) == 1 and len([text for text in said if text.startswith("acceptance with lookup, ")]) == 1


@pytest.mark.parametrize("plans", ['{"float32": {}}', '{"float32": 3}', '{"float32": {"tree": {"dynamic": 1}}}', "3"])
def test_a_file_that_is_no_plan_is_named(plans, tmp_path):
    (tmp_path / "plan.json").write_text('{"format": 1, "plans": ' + plans + "}")
    with pytest.raises(ValueError, match="plan.json: not a plan"):
        load_plan(tmp_path, "float32")


@pytest.mark.parametrize(
    "change",
    [
        {"step_ms": "700"},
        {"step_ms": 0},
        {"step_ms": float("nan")},
        {"tokens_per_step": None},
        {"speedup_interval": 3},
        {"costs_ms": [1, 2]},
        {"costs_ms": {"dynamic": ["a", "b"]}},
    ],
    ids=str,
)
def test_a_plan_with_a_figure_that_is_none_is_named(change, tmp_path):
    values = replace(PLAN, tree=DynamicTree(), details={"costs_ms": {"dynamic": [0.0, 2.0]}}).to_dict()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": 1, "plans": {"float32": values}}))
    assert load_plan(path, "float32").level_ms == 2
    path.write_text(json.dumps({"format": 1, "plans": {"float32": values | change}}))
    with pytest.raises(ValueError, match="plan.json: not a plan"):
        load_plan(path, "float32")


def test_where_drafts_lose_the_plan_says_so_and_none_are_made(model, prompts_of, monkeypatch, caplog):
    planning = planned(model, prompts_of, DEAR, monkeypatch)
    assert "do not speculate" in planning.verdict()
    plan = planning.plans["float32"]
    assert not plan.is_worthwhile and plan.speedup < 1
    with caplog.at_level(logging.WARNING, logger="draftwood"):
        for _ in range(2):
            out = dw.generate(*model, prompts_of[0], max_new_tokens=6, tree=plan)
    assert all(forward.depth == 0 for forward in out.rows[0].forwards)
    assert len(caplog.records) == 1 and "decoding without them" in caplog.text


def test_the_interval_is_that_of_trees_which_other_prompts_chose():
    """Two prompts, one right at rank 0 and one at rank 7: each chooses the tree that gives the other least."""
    seen = [Observation(), Observation()]
    for observation, rank in zip(seen, (0, 7), strict=True):
        observation.trials[:], observation.hits[:, rank] = 20, 20
    costs = Costs(10.0, [(2, 10.0), (64, 30.0)], (1.0, 1.0, 0.1))
    plan = planner._plan(costs, None, seen, [], 0)
    speeds = []
    for chosen_on, measured_on in (seen, seen[::-1]):
        tree = best_tree(acceptance_table([chosen_on]), costs.static_step, planner.MAX_NODES)
        tokens = expected_tokens(tree.parents, acceptance_table([measured_on]))
        speeds.append(tokens * 10.0 / tree.step_ms)
    assert plan.details["speedup_on_other_prompts"] == pytest.approx(sum(speeds) / 2)
    assert plan.interval == pytest.approx((min(speeds), max(speeds)))
    alone = planner._plan(costs, None, seen[:1], [], 0)
    assert alone.interval == pytest.approx((alone.speedup, alone.speedup))


def test_of_a_static_and_a_dynamic_tree_the_one_is_taken_that_does_better_on_prompts_which_did_not_choose_it():
    """The two prompts are right at ranks of their own, which a static tree fits and the other prompt does not have; a
    dynamic one has fewer tokens on each, and as many on both."""
    seen = [Observation(), Observation()]
    for observation, rank in zip(seen, (0, 7), strict=True):
        observation.trials[:], observation.hits[:, rank] = 20, 20
    # in half of the steps the likeliest node is kept
    grown = [Observation(orders=[[[1]] * LEVELS, [[]] * LEVELS] * 10) for _ in seen]
    costs = Costs(10.0, [(2, 10.0), (64, 30.0)], (1.0, 1.0, 0.1), (1.0, 1.0))
    plan = planner._plan(costs, None, seen, grown, 0)
    static, dynamic = plan.details["static"], plan.details["dynamic"]
    assert static["tokens_per_step"] / static["step_ms"] > dynamic["tokens_per_step"] / dynamic["step_ms"]
    assert static["speedup_on_other_prompts"] < dynamic["speedup_on_other_prompts"]
    assert isinstance(plan.tree, DynamicTree) and plan.tokens_per_step == 1.5
    assert plan.details["speedup_on_other_prompts"] == dynamic["speedup_on_other_prompts"]


@pytest.mark.parametrize(("kept", "is_joined"), [(4, True), (2, False)])
def test_lookup_joins_the_planned_tree_where_its_tokens_pay_for_its_nodes(kept, is_joined, tmp_path):
    costs = Costs(10.0, [(2, 12.0), (6, 16.0), (64, 74.0)], (1.0, 1.0, 0.1))
    details = {"costs_ms": costs.to_dict(), "speedup_on_other_prompts": 1.5}
    plan = Plan(dw.Tree.chain(3), 2.5, 15.0, 10.0, (1.2, 1.8), details)
    alone = [Observation(steps=[(4, 2), (4, 2)])]
    seen = [Observation(steps=[(4, kept), (8, kept)])]  # 6 nodes on average, two more than the chain's: 2 ms
    found = planner._with_lookup(plan, JoinedTree(plan.tree), costs, alone, seen)
    gain = (kept / 17) / (2 / 15)
    expected = {"nodes": 6, "tokens_per_step": kept, "without": 2, "step_ms": 17, "gain": pytest.approx(gain)}
    assert found.details["lookup"] == expected
    assert planner._with_lookup(plan, JoinedTree(plan.tree), costs, [Observation()], seen) is plan
    if not is_joined:
        assert found.tree is plan.tree and found.interval == plan.interval
        return
    assert found.speedup == pytest.approx(plan.speedup * gain) and found.tokens_per_step == 2.5 * kept / 2
    assert found.interval == pytest.approx((1.2 * gain, 1.8 * gain))
    path = planner.Planning({"float32": found}, {"device": "here"}).save(tmp_path)
    again = load_plan(path, "float32").tree
    assert again.lookup == found.tree.lookup and again.tree.rows == [[-1, 0, 1, 2]]


class Knowing:
    """Proposes a fixed tree, the right token as the child of rank `rank`, down to `depth` levels."""

    max_length = None

    def __init__(self, text, tree, rank, depth, draft=None):
        self.text, self.tree, self.rank, self.depth = text, tree, rank, depth

    def start(self, input_ids, lengths, features, roots):
        self.roots, self.done = roots, 1

    def propose(self, max_depth):
        from draftwood.decode.propose import Proposal

        tree = self.tree.limited(max_depth)
        tokens, children = [int(self.roots[0])] + [0] * (tree.num_nodes - 1), tree.children()
        right = {0}
        for node, below in enumerate(children):
            place = self.done + len(tree.path(node)) - 1
            for rank, child in enumerate(below):
                is_right = node in right and rank == self.rank and len(tree.path(child)) - 1 <= self.depth
                tokens[child] = self.text[place] if is_right else (self.text[place] + 1 + rank) % 61
                right |= {child} if is_right else set()
        return Proposal(torch.tensor([tokens]), tree)

    def advance(self, tokens, features, paths, roots):
        self.done, self.roots = self.done + len(paths[0]), roots


def test_acceptance_is_counted_by_depth_and_rank(targets, tiny):
    target, ids = targets("llama"), tiny.prompt_ids((1, 4))
    text = dw.generate(target, None, ids, max_new_tokens=60, eos_token_ids=[]).tokens[0]
    knowing = Knowing([*text, *text], wide_tree(), rank=2, depth=2)
    target.model.generation_config.eos_token_id, kept = None, target.model.generation_config.eos_token_id
    try:
        (seen,) = observe(target, knowing, [ids], None, max_new_tokens=40)
    finally:
        target.model.generation_config.eos_token_id = kept
    steps = seen.trials[0, 0]
    assert steps > 8
    assert seen.hits[0].tolist() == [0, 0, steps, 0, 0, 0, 0, 0] and (seen.trials[0] == steps).all()
    assert seen.hits[1].tolist() == [0, 0, steps, 0, 0, 0, 0, 0]
    assert seen.hits[2:].sum() == 0
    assert len(seen.orders) == steps


def test_a_table_never_rises_with_the_rank_and_unreached_depths_take_the_one_above():
    seen = Observation()
    seen.trials[0], seen.hits[0, :3] = 10, [4, 1, 3]
    table = acceptance_table([seen])
    assert table[0][:4] == pytest.approx([0.4, 0.2, 0.2, 0.0])
    assert table[1:] == [table[0]] * (LEVELS - 1) and len(table[0]) == RANKS


def test_a_dynamic_tree_cut_to_its_best_nodes_keeps_those_of_the_path_within():
    seen = Observation(orders=[[[3], [3, 5]], [[], []], [[1], [1, 9]]])
    assert dynamic_tokens([seen], 4, 1) == pytest.approx(1 + 2 / 3)
    assert dynamic_tokens([seen], 4, 2) == pytest.approx(1 + 2 / 3)
    assert dynamic_tokens([seen], 9, 2) == pytest.approx(1 + 4 / 3)
    assert dynamic_tokens([], 9, 2) == 1


def test_costs_are_measured_for_every_dtype_and_kind_of_step(model, tiny):
    costs = measure_costs({"a": model, "b": model}, tiny.prompt_ids((1, 6)), repeats=2, sizes=(2, 5))
    for one in costs.values():
        assert one.autoregressive > 0 and [size for size, _ in one.verify] == [2, 5]
        assert min(one.static) >= 0 and sum(one.static) > 0 and one.dynamic is not None and one.spread >= 1
    smooth = Costs(1.0, [(2, 3.0), (4, 5.0), (8, 3.0)], (0.5, 0.25, 0.125))
    assert [smooth.verify_ms(n) for n in (1, 2, 3, 4, 8, 99)] == [3, 3, 3.5, 4, 4, 4]
    assert smooth.static_step(3, 2) == 4 + 0.5 + 0.5 + 0.375


# Adapting


PLAN = Plan(dw.Tree.chain(3), tokens_per_step=2.5, step_ms=15.0, autoregressive_ms=10.0, interval=(1.5, 1.8))


class Turning(Knowing):
    """Always wrong before `turn` tokens, always right from there on."""

    turn = 10**9

    def propose(self, max_depth):
        self.rank = 0 if self.done >= self.turn else 9
        return super().propose(max_depth)


def decode(target, ids, turn, length):
    text = dw.generate(target, None, ids, max_new_tokens=length, eos_token_ids=[]).tokens[0]
    turning = Turning([*text, *text], dw.Tree.chain(3), 0, 3)
    turning.turn = turn
    adaptive = AdaptiveProposer(turning, PLAN)
    out = dw.generate(target, adaptive, ids, max_new_tokens=length, eos_token_ids=[])
    return out, text


def test_a_draft_that_is_never_right_is_left_idle_and_the_text_is_the_same(targets, tiny):
    out, text = decode(targets("llama"), tiny.prompt_ids((1, 4)), 10**9, 120)
    assert out.tokens == [text]
    drafted = [forward.depth > 0 for forward in out.rows[0].forwards]
    assert all(drafted[:5]) and sum(drafted[60:]) <= 8  # tries are short and ever rarer
    assert any(drafted[20:])


def test_a_draft_that_turns_good_comes_back(targets, tiny):
    out, text = decode(targets("llama"), tiny.prompt_ids((1, 4)), 40, 150)
    assert out.tokens == [text]
    depths = [forward.depth for forward in out.rows[0].forwards]
    assert 0 in depths[:40] and all(depths[-12:-2])
    assert sum(f.accepted for f in out.rows[0].forwards) > 40


@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_that_was_idle_reads_what_it_missed_and_drafts_as_if_it_had_not_been(rows, model, tiny):
    target, draft = model
    ids = tiny.prompt_ids((rows, 5), 3)
    plan = replace(PLAN, tree=dw.Tree.chain(2))
    always = StaticProposer(draft, plan.tree)
    adaptive = AdaptiveProposer(StaticProposer(draft, plan.tree), plan, Adaptation(shortest_pause=5))
    features, roots = torch.randn(rows, 5, target.hidden_dim), torch.arange(rows) + 7
    with torch.no_grad():
        for proposer in (always, adaptive):
            proposer.start(ids, [5] * rows, features, roots)
        adaptive.idle_left = 5
        for step in range(4):
            assert adaptive.propose(9).tree.num_nodes == 1
            read = torch.randn(rows, 1, target.hidden_dim)
            tokens, roots = roots[:, None], roots + 1 + step
            paths = [[0]] * rows if step < 2 else [[0], []][:rows]  # the second row ends
            roots = torch.tensor([roots[b] if path else tokens[b, 0] for b, path in enumerate(paths)])
            for proposer in (always, adaptive):
                proposer.advance(tokens, read, paths, roots)
        got, want = adaptive.propose(9), always.propose(9)
    assert got.tree.num_nodes == 3 and not adaptive.missed
    assert got.tokens.tolist() == want.tokens.tolist()
    torch.testing.assert_close(adaptive.inner.head_row, always.head_row, atol=1e-5, rtol=1e-4)


def test_an_adaptive_draft_past_its_length_is_stopped_as_any_other(model, tiny):
    target, draft = model
    proposer = make_proposer(draft, PLAN)
    assert isinstance(proposer, AdaptiveProposer)
    proposer.max_length = 12
    ids = tiny.prompt_ids((1, 5), 1)
    out = dw.generate(target, proposer, ids, max_new_tokens=20)
    assert out.tokens[0] == tiny.greedy(target.model, ids, 20)
    assert make_proposer(draft, replace(PLAN, tree=DynamicTree(levels=2, budget=4))).inner.settings.budget == 4
    assert make_proposer(None, PLAN) is None


GROWN = replace(
    PLAN,
    tree=DynamicTree(levels=3, budget=8),
    step_ms=100.0,
    autoregressive_ms=70.0,
    details={"costs_ms": {"dynamic": [1.0, 6.0]}},
)


@pytest.mark.parametrize("alpha", [0.02, 0.3, 0.6, 0.8, 0.95])
def test_a_dynamic_tree_becomes_as_deep_as_is_fastest_for_its_acceptance(alpha, model):
    proposer = DynamicProposer(model[1], GROWN.tree)
    depth = Depth(proposer, GROWN, GROWN.level_ms, Adaptation())
    depth.start()
    draw = np.random.default_rng(0)

    def speed(levels):
        return sum(alpha**level for level in range(levels + 1)) / (GROWN.step_ms + (levels - 3) * GROWN.level_ms)

    seen = []
    for _ in range(800):
        right = int(draw.geometric(1 - alpha)) - 1
        mean = sum(alpha**level for level in range(proposer.levels + 1))
        depth.observe([1 + min(right, proposer.levels)], mean)
        seen.append(proposer.levels)
    reached = np.mean([speed(levels) for levels in seen[400:]])
    assert reached > 0.98 * max(map(speed, range(1, 9)))
    depth.start()
    assert proposer.levels == 3


def test_a_plan_changes_the_depth_of_its_tree_and_not_the_text(model, prompts_of, tiny):
    target, draft = model
    want = tiny.greedy(target.model, prompts_of[0], 80)
    for tree, inner in ((GROWN.tree, lambda p: p.inner), (JoinedTree(GROWN.tree), lambda p: p.inner.inner)):
        proposer = make_proposer(draft, replace(GROWN, tree=tree, step_ms=40.0, autoregressive_ms=70.0))
        out = dw.generate(target, proposer, prompts_of[0], max_new_tokens=80, eos_token_ids=[])
        assert out.tokens[0][: len(want)] == want
        assert inner(proposer).levels < 3  # an untrained draft is hardly ever right
