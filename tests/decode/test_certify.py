"""The certificate of a sound verifier, and of verifiers broken one at a time."""

import functools
import json

import pytest
import torch
from transformers import GenerationConfig

import draftwood as dw
from draftwood.decode import certify_greedy, enumeration, sampled, verify
from draftwood.decode import generate as loop
from draftwood.decode.certify import SAMPLED, certify
from draftwood.decode.certify_sampling import certify_sampling, chi_square_tail, find_support
from draftwood.decode.certify_state import certify_states
from draftwood.decode.propose import Proposal
from draftwood.decode.verify import Acceptance
from draftwood.models import cache, gates, seam
from draftwood.models import target as target_module


@pytest.fixture
def bamba(targets):
    torch.manual_seed(0)
    return targets("bamba"), dw.EagleDraft.from_target(targets("bamba")).eval()


def quick(target, draft, **settings):
    return certify(target, draft, quick=True, rows=300, **settings)


def failed(certificate):
    return [evidence.name for evidence in certificate.evidence if not evidence.passed]


def test_a_sound_verifier_is_certified_with_hashes_versions_and_figures(bamba, tmp_path):
    target, draft = bamba
    certificate = quick(target, draft)
    assert failed(certificate) == []
    saved = json.loads(certificate.save(tmp_path / "certificate.json").read_text())
    assert saved["passed"] and saved["format"] == 1 and saved["versions"]["torch"] == torch.__version__
    assert len(saved["subject"]["draft_sha256"]) == len(saved["subject"]["target_head_sha256"]) == 64
    assert saved["subject"]["dtype"] == "float32" and saved["settings"]["seed"] == 0 and saved["date"]
    figures = {evidence["name"]: evidence["figures"] for evidence in saved["evidence"]}
    one_row = figures["state after each commit, one row"]
    assert set(one_row["errors"]) == {"keys", "values", "conv window", "recurrent state"}
    assert {0, 1, 2, 3} <= set(one_row["accepted"]) and max(one_row["errors"].values()) < 1e-5
    assert 5 in figures["state after each commit, a batch"]["accepted"]
    assert all(case["total_variation"] < 1e-12 for case in figures["acceptance rule, drawn trees"]["cases"])
    assert figures["sampling, sampled-3x2"]["drafts_accepted"] > 0
    drawn = next(e for e in certificate.evidence if e.name == "sampling, sampled-3x2")
    prompt = gates.probe_ids(target, 5)[:, -4:]
    assert certify_sampling(target, draft, prompt, "sampled-3x2", rows=300, length=3, seed=0) == drawn


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "mamba", "falcon_h1", "lfm2"])
def test_states_equal_a_fresh_prefill_in_every_family(family, targets, tiny):
    for evidence in certify_states(targets(family), [tiny.prompt_ids((1, n)) for n in (4, 7)], 8):
        assert evidence.passed, evidence.detail


def test_a_strategy_of_its_own_is_certified_as_it_is(targets, tiny, oracle):
    target, ids = targets("llama"), tiny.prompt_ids((1, 5))
    evidence = certify_greedy.certify_greedy(target, _Nothing(), [ids], [None], 8)
    assert all(e.passed for e in evidence)
    with pytest.raises(ValueError, match="Proposer"):
        certify(target, _Nothing(), trees=["stree"], quick=True)


class _Nothing:
    max_length = None

    def start(self, input_ids, lengths, features, roots):
        self.roots = roots

    def propose(self, max_depth):
        return Proposal(self.roots[:, None], dw.Tree.chain(0))

    def advance(self, tokens, features, paths, roots):
        self.roots = roots


# Broken verifiers


def _sorted_siblings(logits, tokens, tree, draws, sampling, generator=None):
    """Siblings in the order of the draft's probability, as STree's released code tries them."""
    orders = []
    for b in range(tokens.shape[0]):
        children = tree.children(b)
        order, level = [0], [0]
        while level:
            below = []
            for node in level:
                log_q = draws.at(torch.full((tokens.shape[0],), node), logits.shape[-1])[b]
                below += sorted(children[node], key=lambda n, q=log_q, b=b: -float(q[tokens[b, n]]))
            order += below
            level = below
        orders.append(order)
    index = torch.tensor(orders)
    rows = [
        [-1 if n == 0 else order.index(tree.rows[b % tree.num_rows][n]) for n in order]
        for b, order in enumerate(orders)
    ]
    slot = draws.slot.expand(len(orders), -1).gather(1, index)
    moved = sampled.Draws(draws.log_q, slot, draws.width, draws.vocab)
    kept = REAL_DRAWN(
        logits.gather(1, index[:, :, None].expand_as(logits)),
        tokens.gather(1, index),
        dw.Tree.from_parents(rows),
        moved,
        sampling,
        generator,
    )
    return kept._replace(paths=[[orders[b][n] for n in path] for b, path in enumerate(kept.paths)])


REAL_DRAWN, REAL_SAMPLED, REAL_TRY = sampled.verify_drawn, verify.verify_sampled, sampled.try_child


def _raw_bonus(logits, tokens, tree, sampling, generator=None):
    kept = REAL_SAMPLED(logits, tokens, tree, sampling, generator)
    emitted = []
    for b, path in enumerate(kept.paths):
        raw = verify.draw_one(logits[b : b + 1, path[-1]].softmax(-1), generator)
        emitted.append([*kept.emitted[b][:-1], int(raw)])
    return Acceptance(kept.paths, emitted, kept.missed)


def _without_renormalising(p, log_q, token):
    trial = REAL_TRY(p, log_q, token)
    q = log_q.to(p.dtype).softmax(-1)
    return trial._replace(p=(p - q).clamp(min=0) + 1e-12)


def sort_siblings(patch):
    patch.setattr(sampled, "verify_drawn", _sorted_siblings)
    patch.setattr(loop, "verify_drawn", _sorted_siblings)


def take_the_bonus_from_raw_logits(patch):
    patch.setattr(verify, "verify_sampled", _raw_bonus)
    patch.setattr(loop, "verify_sampled", _raw_bonus)


def reject_without_renormalising(patch):
    patch.setattr(sampled, "try_child", _without_renormalising)


def keep_the_conv_window_of_all_drafts(patch):
    def last_inputs(window, x, tables, nodes):
        return torch.cat([window, x], 2)[:, :, -window.shape[2] :]

    patch.setattr(cache, "tree_conv_commit", last_inputs)


def take_the_state_of_the_node_before(patch):
    real = cache._RecurrentPart.commit
    patch.setattr(
        cache._RecurrentPart, "commit", lambda self, tables, nodes: real(self, tables, (nodes - 1).clamp(min=0))
    )


def index_by_count(patch):
    real = target_module.Target.commit
    patch.setattr(target_module, "check_paths", lambda *_: None)
    patch.setattr(
        target_module.Target, "commit", lambda self, state, paths: real(self, state, [range(len(p)) for p in paths])
    )


def forget_the_position(patch):
    real = target_module.DecodeState.advance
    patch.setattr(target_module.DecodeState, "advance", lambda self, counts: real(self, [min(c, 2) for c in counts]))


@pytest.mark.parametrize("mutation", [sort_siblings, reject_without_renormalising])
def test_a_broken_rule_for_drawn_trees_is_caught_by_enumeration(mutation, monkeypatch):
    case = ([-1, 0, 0], dict(temperature=1.0), 3, 0)
    assert enumeration.drawn_variation(*case) < enumeration.BOUND
    mutation(monkeypatch)
    assert enumeration.drawn_variation(*case) > 1e-3


def test_a_raw_bonus_token_is_not_certified(bamba, monkeypatch):
    take_the_bonus_from_raw_logits(monkeypatch)
    found = failed(quick(*bamba))
    assert found == ["acceptance rule, trees without chance", "sampling, Tree(1 x 4 nodes, depth 2)"]


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
@pytest.mark.parametrize(
    "mutation",
    [
        keep_the_conv_window_of_all_drafts,
        take_the_state_of_the_node_before,
        index_by_count,
        forget_the_position,
    ],
)
def test_a_broken_commit_is_caught_in_the_states_and_in_the_text(mutation, family, targets, tiny, monkeypatch):
    target, prompts = targets(family), [tiny.prompt_ids((1, n), 3) for n in (4, 7)]
    certify_greedy_of = functools.partial(certify_greedy.certify_greedy, target, _Nothing(), prompts, [None], 24)
    mutation(monkeypatch)
    for evidence in certify_states(target, prompts, 8):
        assert not evidence.passed and evidence.figures["worst"]
    scripted = certify_greedy_of()[-1]
    assert scripted.figures["drafts_accepted"] and not scripted.passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_excuses_a_sound_verifier_in_low_precision_and_no_broken_one(dtype, tiny, monkeypatch):
    target = dw.load_target(tiny.build("bamba").to(dtype))
    torch.manual_seed(0)
    draft = dw.EagleDraft.from_target(target).eval()
    prompts = [gates.probe_ids(target, n) for n in (5, 8)]

    def passes():
        sampling = certify_sampling(target, draft, prompts[0], SAMPLED[0], rows=200, length=3, seed=0)
        return sampling, [e.passed for e in certify_states(target, prompts, 6)]

    sampling, states = passes()
    assert sampling.passed and states == [True, True]
    assert sampling.figures["tokens_at_the_cut"] > 0  # what rounding decides
    take_the_bonus_from_raw_logits(monkeypatch)
    take_the_state_of_the_node_before(monkeypatch)
    sampling, states = passes()
    assert not sampling.passed and len(sampling.figures["impossible"]) > 20 and states == [False, False]


def test_siblings_sorted_in_the_loop_are_caught_by_counting_what_this_draft_gives(targets, tiny, monkeypatch):
    target, prompt = targets("bamba"), tiny.prompt_ids((1, 4), 4)
    torch.manual_seed(1)
    draft = dw.EagleDraft.from_target(target, draft_vocab=torch.tensor([0, 6, 11, 14, 18])).eval()
    settings = dict(rows=800, length=3, seed=0)
    assert certify_sampling(target, draft, prompt, "sampled-3x1", **settings).passed
    monkeypatch.setattr(loop, "verify_drawn", _sorted_siblings)
    assert not certify_sampling(target, draft, prompt, "sampled-3x1", **settings).passed


def test_a_tree_operator_that_reads_a_chain_is_caught(bamba, tiny, monkeypatch):
    target, draft = bamba

    def flattened(forward, hidden_states, weight, bias=None, activation=None, **_):
        x = torch.cat([forward.cache.current.window[:, :, 1:], hidden_states], 2)
        y = torch.nn.functional.conv1d(x, weight[:, None], bias, groups=x.shape[1])
        return torch.nn.functional.silu(y)

    monkeypatch.setattr(target, "operators", {**seam.OPERATORS, "causal_conv1d_fn": flattened})
    evidence = certify_greedy.certify_greedy(target, draft, [tiny.prompt_ids((1, 5))], ["stree"], 16)
    assert not evidence[-1].passed


def test_a_verifier_that_raises_has_failed_with_its_error(bamba, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such tree")

    monkeypatch.setattr(loop, "verify_greedy", broken)
    certificate = quick(*bamba)
    assert not certificate.passed
    assert any(e.detail == "RuntimeError: no such tree" for e in certificate.evidence if not e.passed)


# The checks themselves


def test_a_difference_is_legitimate_in_bfloat16_only_within_the_threshold(targets, tiny):
    target, ids = targets("llama"), tiny.prompt_ids((1, 5))
    theirs = tiny.greedy(target.model, ids, 6)
    with torch.no_grad():
        logits = target.model(torch.cat([ids, torch.tensor([theirs[:2]])], 1)).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    found = certify_greedy.find_difference(target, 3, ids, [*theirs[:2], second], theirs)
    gap = float(logits.topk(2).values.diff().abs())
    assert (found.prompt, found.position, found.ours, found.theirs) == (3, 2, second, theirs[2])
    assert found.top2_gap == pytest.approx(gap, abs=1e-4) and found.shortfall == pytest.approx(gap, abs=1e-4)
    assert not found.is_legitimate and found.threshold == 0
    assert certify_greedy.threshold(torch.bfloat16, -10.0) == pytest.approx(4 * 2**-7 * 10)
    cut = certify_greedy.find_difference(target, 0, ids, theirs[:1], theirs)
    assert cut.ours is None and not cut.is_legitimate


def test_what_rounding_decides_is_what_lies_within_the_bound_of_the_cut():
    logits = torch.tensor([1.9, 5.0, 0.0, 4.9, 4.8, 2.0])  # top-4 keeps 5.0, 4.9, 4.8, 2.0, top-p all but the last
    assert find_support(logits, 1e-6).possible == find_support(logits, 1e-6).sure.keys() == {1, 3, 4}
    logits[[0, 5]] = torch.tensor([3.9, 4.0])
    exact = find_support(logits, 1e-6)
    assert exact.possible == exact.sure.keys() == {1, 3, 4, 5}
    want = logits[[1, 3, 4, 5]].softmax(0)
    assert [exact.sure[n] for n in (1, 3, 4, 5)] == pytest.approx(want.tolist())
    near = find_support(logits, 0.11)
    assert near.possible == {0, 1, 3, 4, 5} and near.sure.keys() == {1, 3, 4}
    level = find_support(torch.tensor([5.0, 4.0, 4.0, 4.0, 4.0, 4.0]), 1e-6)  # top-k keeps all that are level
    assert level.possible == {0, 1, 2, 3, 4, 5} and level.sure.keys() == {0}


def test_the_mass_above_a_token_decides_top_p_with_the_bound_in_its_odds():
    p = torch.tensor([0.6, 0.34, 0.06])
    odds = 0.94 / 0.06 / (0.95 / 0.05)  # the last one is dropped where the odds of what is above it grow by 1 / odds
    bound = float(-torch.tensor(odds).log())
    assert find_support(p.log(), bound - 0.01).sure.keys() == {0, 1, 2}
    assert find_support(p.log(), bound + 0.01).sure.keys() == {0, 1}
    p = torch.tensor([0.6, 0.36, 0.04])
    bound = float((torch.tensor(0.96 / 0.04) / (0.95 / 0.05)).log())
    assert find_support(p.log(), bound - 0.01).possible == {0, 1}
    assert find_support(p.log(), bound + 0.01).possible == {0, 1, 2}


def test_every_outcome_adds_up_and_has_the_right_weight():
    p = torch.tensor([[0.2, 0.0, 0.8]], dtype=torch.float64)

    def run():
        first = int(verify.draw_one(p))
        is_true = bool((torch.rand(1) < torch.tensor([0.25 if first else 1.0], dtype=torch.float64))[0])
        return first, is_true

    outcomes = {result: weight for weight, result in enumeration.every_outcome(run)}
    assert outcomes == pytest.approx({(0, True): 0.2, (2, True): 0.2, (2, False): 0.6})


def test_a_rule_that_draws_in_another_way_is_not_taken_for_exact():
    seen = [weight for weight, _ in enumeration.every_outcome(lambda: torch.randn(1) > 0)]
    assert seen == [1.0]


@pytest.mark.parametrize(
    "statistic, freedom, tail", [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (23.209251, 10, 0.01)]
)
def test_the_tail_is_that_of_the_tables(statistic, freedom, tail):
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-4)


def test_the_truth_is_transformers_own_generate(targets, tiny):
    target, ids = targets("bamba"), tiny.prompt_ids((1, 5))
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=tiny.EOS, pad_token_id=0)
    want = target.model.generate(ids, generation_config=config)[0, 5:].tolist()
    assert certify_greedy.transformers_generate(target, ids, 6, verify.Sampling()) == want
