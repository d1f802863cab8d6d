"""Every strategy: its output is the target's, and its tree is what the paper says."""

from itertools import pairwise

import pytest
import torch

import draftwood as dw
from draftwood.decode.propose import BeamTree, DynamicTree, JoinedTree, Lookahead, Lookup, make_proposer, resolve_tree
from draftwood.decode.propose.adaptive import follow
from draftwood.decode.propose.lookahead import LookaheadProposer
from draftwood.decode.propose.plan import Plan
from draftwood.models.language_draft import LanguageDraft

TREES = [
    "beam-3x4",
    "beam-1x3",
    "lookup",
    "lookup-4x3",
    "lookahead",
    "lookahead-3x3x2",
    "dynamic-8+lookup",
    "stree+lookup-4x2",
]
FAMILIES = ["llama", "mamba2", "bamba", "qwen3_5_text"]


@pytest.fixture(scope="module")
def batch(targets, tiny):
    """`batch(family)`: three prompts of different length, one that repeats itself, their mask, and 24 greedy tokens."""
    made = {}

    def get(family: str):
        if family not in made:
            rows = [tiny.prompt_ids((1, n), seed) for n, seed in ((7, 0), (1, 1), (3, 2))]
            rows.append(torch.cat([rows[0][:, :5]] * 3, 1))
            width = max(row.shape[1] for row in rows)
            ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
            mask = torch.cat([torch.nn.functional.pad(torch.ones_like(r), (width - r.shape[1], 0)) for r in rows])
            made[family] = ids, mask, [tiny.greedy(targets(family).model, row, 24) for row in rows]
        return made[family]

    return get


def eagle(target):
    torch.manual_seed(0)
    return dw.EagleDraft.from_target(target).eval()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_of_ragged_rows_is_that_of_transformers(family, tree, targets, batch):
    ids, mask, want = batch(family)
    out = dw.generate(targets(family), eagle(targets(family)), ids, attention_mask=mask, max_new_tokens=24, tree=tree)
    assert out.tokens == want


def text_rows(target, tree, prompts, roots):
    proposer = make_proposer(None, tree)
    width = max(map(len, prompts))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in prompts])
    proposer.start(ids, [len(row) for row in prompts], torch.zeros(len(prompts), width, 1), torch.tensor(roots))
    return proposer


def paths_of(proposal, row):
    """Token paths from below the root to every leaf, in node order."""
    below, tokens = proposal.tree.children(row), proposal.tokens[row].tolist()
    leaves = [n for n in range(1, len(tokens)) if not below[n] and proposal.tree.valid[row % proposal.tree.num_rows, n]]
    return [[tokens[n] for n in proposal.tree.path(leaf, row)[1:]] for leaf in leaves]


def test_lookup_drafts_what_followed_the_longest_latest_match():
    prompts = [[5, 6, 7, 8, 9, 6, 7, 1, 2, 5, 6, 7, 3, 6], [5, 6]]
    proposer = text_rows(None, Lookup(num_tokens=3, matches=1, max_ngram=3, min_ngram=1), prompts, [7, 4])
    assert paths_of(proposer.propose(9), 0) == [[3, 6, 7]]  # 3 6 7 stood nowhere before, 6 7 last before the 3
    assert paths_of(proposer.propose(9), 1) == []
    assert paths_of(proposer.propose(2), 0) == [[3, 6]]
    proposer = text_rows(None, Lookup(num_tokens=2, matches=3, max_ngram=3, min_ngram=1), prompts, [7, 4])
    assert paths_of(proposer.propose(9), 0) == [[3, 6], [1, 2], [8, 9]]
    proposal = proposer.propose(9)
    node = proposal.tokens[0].tolist().index(1)
    proposer.advance(proposal.tokens, torch.zeros(2, 1), [[0, node], []], torch.tensor([2, 99]))
    assert proposer.texts == [[*prompts[0], 7, 1, 2], [*prompts[1], 4]]
    assert proposer.propose(9).tokens[:, 0].tolist() == [2, 4]
    assert paths_of(proposer.propose(9), 0)[0] == [5, 6]


def test_a_place_that_matches_by_more_tokens_counts_once():
    proposer = text_rows(None, Lookup(num_tokens=1, matches=2), [[9, 2, 3, 8, 1, 2, 3, 7, 5, 1, 2]], [3])
    assert paths_of(proposer.propose(9), 0) == [[7], [8]]


def test_matches_that_go_on_alike_share_their_nodes():
    proposer = text_rows(None, Lookup(num_tokens=3, matches=2), [[1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1]], [2])
    proposal = proposer.propose(9)
    assert paths_of(proposal, 0) == [[3, 4, 6], [3, 4, 5]] and proposal.tree.num_nodes == 5


def test_lookahead_learns_the_n_grams_of_the_window_and_drafts_them():
    """A target whose next token is a function of the last one: the window's columns follow it after a few steps."""
    follow = torch.tensor([(7 * t + 3) % 31 for t in range(31)])
    proposer = text_rows(None, Lookahead(window=4, ngram=3, pool=2), [[4, 9, 11]], [2])
    root, emitted, longest = 2, [2], 0
    for _ in range(12):
        proposal = proposer.propose(20)
        logits = torch.nn.functional.one_hot(follow[proposal.tokens], 31).float()
        path, below = [0], proposal.tree.children(0)
        while step := [n for n in below[path[-1]] if proposal.tokens[0, n] == follow[proposal.tokens[0, path[-1]]]]:
            path.append(step[0])
        longest = max(longest, len(path) - 1)
        emitted += [*proposal.tokens[0, path[1:]].tolist(), int(follow[proposal.tokens[0, path[-1]]])]
        root = emitted[-1]
        proposer.read_logits(logits)
        proposer.advance(proposal.tokens, torch.zeros(1, 1), [path], torch.tensor([root]))
    assert all(b == follow[a] for a, b in pairwise(emitted)) and longest >= 2
    (row,) = proposer._rows
    assert [len(level) for level in row.levels] == [4, 4]
    assert all(len(ngrams) <= 2 and all(len(n) == 2 for n in ngrams) for ngrams in row.pool.values())


def test_a_newer_guess_of_the_window_sees_the_oldest_row_up_to_its_position_and_its_own_column():
    proposer = text_rows(None, Lookahead(window=3, ngram=4, pool=2), [[1, 2, 3]], [10])
    proposer._rows[0].levels = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    proposal = proposer.propose(20)
    assert paths_of(proposal, 0) == [[20, 30], [11, 21, 31], [11, 12, 22, 32]]
    assert proposal.tokens[0, proposer._rows[0].ends].tolist() == [30, 31, 32]
    assert paths_of(proposer.propose(3), 0) == []  # no room for the window


def test_the_pool_holds_the_latest_n_grams_of_a_first_token_the_root_among_them():
    proposer = text_rows(None, Lookahead(window=2, ngram=3, pool=2), [[1, 2, 3]], [10])
    (row,) = proposer._rows
    for step in range(3):
        row.levels = [[59, 5], [20 + step, 30]]  # 59 was a guess of what is the root by now
        proposal = proposer.propose(20)
        logits = torch.zeros(1, proposal.tree.num_nodes, 61)
        logits[0, row.ends, torch.tensor([40 + step, 50])] = 1
        proposer.read_logits(logits)
    assert [list(ngrams) for ngrams in row.pool.values()] == [[(21, 41), (22, 42)], [(30, 50)]]
    assert list(row.pool) == [10, 5]
    assert paths_of(proposer.propose(1), 0) == [[22], [21]]


def test_a_strategy_that_follows_a_plan_still_reads_the_targets_logits(targets, tiny):
    plan = Plan(dw.Tree.chain(2), tokens_per_step=9.0, step_ms=1.0, autoregressive_ms=1.0, interval=(1.0, 9.0))
    inner = LookaheadProposer(Lookahead(3, 3, 2))
    settings = dict(max_new_tokens=12, eos_token_ids=[])
    out = dw.generate(targets("llama"), follow(plan, inner), tiny.prompt_ids((1, 4), 4), **settings)
    assert sum(map(len, inner._rows[0].pool.values())) > 2
    assert out.tokens == dw.generate(targets("llama"), None, tiny.prompt_ids((1, 4), 4), **settings).tokens


def test_lookahead_and_lookup_save_steps_on_a_text_that_repeats_itself(targets, tiny):
    target, steps = targets("llama"), {}
    for tree in ("lookup", "lookahead"):
        out = dw.generate(target, None, tiny.prompt_ids((1, 3), 4), max_new_tokens=120, eos_token_ids=[], tree=tree)
        steps[tree] = out.steps
    assert max(steps.values()) < 110


def beam_by_hand(log_probs, beams, levels):
    """The paths that are kept at some step, with plain lists."""
    kept, front = set(), [((), 0.0)]
    for _ in range(levels):
        grown = [((*path, t), s + float(x)) for path, s in front for t, x in enumerate(log_probs(path))]
        front = sorted(grown, key=lambda c: -c[1])[:beams]
        kept |= {path for path, _ in front}
    return kept


@pytest.mark.parametrize("kind", ["eagle", "language model"])
@pytest.mark.parametrize("beams, levels, limit", [(3, 4, 9), (2, 3, 9), (1, 4, 9), (3, 4, 2)])
def test_a_beam_tree_is_the_union_of_the_beams_of_every_step(kind, beams, levels, limit, targets, tiny):
    target = targets("llama")
    draft = eagle(target) if kind == "eagle" else LanguageDraft(targets("bamba"), target)
    ids, roots = tiny.prompt_ids((2, 5), 3), torch.tensor([7, 9])
    features = target.features(ids)
    proposer = make_proposer(draft, BeamTree(beams, levels))
    with torch.no_grad():
        proposer.start(ids, [5, 5], features, roots)
        proposal = proposer.propose(limit)
    for row in range(2):

        @torch.no_grad()
        def log_probs(path, row=row):
            if kind != "eagle":
                text = torch.cat([ids[row], roots[row : row + 1], torch.tensor(path, dtype=torch.int64)])
                return targets("bamba").model(text[None]).logits[0, -1].log_softmax(-1)
            state = draft.new_state(1)
            read = torch.cat([ids[row, 1:], roots[row : row + 1]])[None]
            out = draft.extend(state, features[row : row + 1], read)[:, -1:]
            for token in path:
                out = draft.extend(state, out, torch.tensor([[token]]))
            return draft.logits(out)[0, 0].log_softmax(-1)

        tokens = proposal.tokens[row].tolist()
        got = {tuple(tokens[n] for n in proposal.tree.path(n, row)[1:]) for n in range(1, len(tokens))}
        assert got == beam_by_hand(log_probs, beams, min(levels, limit)) and len(got) == len(tokens) - 1


@pytest.mark.parametrize("tree", ["dynamic-8", "chain-3", "beam-2x3"])
def test_a_joined_tree_is_the_union_of_the_drafts_and_of_lookups_paths(tree, targets, tiny):
    target, roots = targets("llama"), torch.tensor([7, 9])
    draft, ids = eagle(target), torch.tensor([[5, 7, 3, 6, 5, 7, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8]])
    features = target.features(ids)
    alone, lookup = make_proposer(draft, tree), make_proposer(None, "lookup-4x2")
    joined = make_proposer(draft, f"{tree}+lookup-4x2")
    with torch.no_grad():
        for proposer in (alone, lookup, joined):
            proposer.start(ids, [8, 8], features, roots)
        apart, proposal = [alone.propose(9), lookup.propose(9)], joined.propose(9)

    def prefixes(proposal, row):
        return {tuple(path[: n + 1]) for path in paths_of(proposal, row) for n in range(len(path))}

    assert prefixes(apart[1], 0) >= {(4,), (3,), (4, 5), (3, 6, 5, 7)} and not prefixes(apart[1], 1)
    for row in (0, 1):
        nodes = int(proposal.tree.valid[row % proposal.tree.num_rows].sum()) - 1
        expected = prefixes(apart[0], row) | prefixes(apart[1], row)
        assert prefixes(proposal, row) == expected and nodes == len(expected), "no path is there twice"


def test_a_joined_tree_saves_steps_where_the_text_repeats_itself(targets, tiny):
    target = targets("llama")
    draft, ids = eagle(target), tiny.prompt_ids((1, 3), 4)
    settings = dict(max_new_tokens=120, eos_token_ids=[])
    plain, joined = (dw.generate(target, draft, ids, tree=tree, **settings) for tree in ("chain-2", "chain-2+lookup"))
    assert joined.tokens == plain.tokens and joined.steps < 0.7 * plain.steps


def test_every_form_is_read_and_a_wrong_one_is_answered_with_all_of_them():
    assert resolve_tree("beam-3x4") == BeamTree(3, 4)
    assert resolve_tree("lookup") == Lookup() and resolve_tree("lookup-6x2") == Lookup(6, 2)
    assert resolve_tree("lookahead-4x3x2") == Lookahead(4, 3, 2)
    assert resolve_tree("beam-3x4+lookup") == JoinedTree(BeamTree(3, 4), Lookup(5))
    assert resolve_tree("dynamic-8+lookup-3x2") == JoinedTree(DynamicTree.of_budget(8), Lookup(3, 2))
    for wrong in (
        "sampled-3x4+lookup",
        "lookup+lookup",
        "beam-3x4+lookup+lookup",
        "+lookup",
        "dynamic-16+",
        "beam-3x4+chain-2",
    ):
        with pytest.raises(ValueError, match="expected one that is not sampled and"):
            resolve_tree(wrong)
    with pytest.raises(ValueError, match="a plan brings lookup where that pays"):
        resolve_tree("plan+lookup")
    with pytest.raises(ValueError, match="no tree 'sampeld-3x4'; did you mean 'sampled-3x4'") as error:
        resolve_tree("sampeld-3x4")
    for form in ("chain-", "stree", "eagle-25", "dynamic-", "beam-", "sampled-", "lookup-", "lookahead-"):
        assert form in str(error.value).split("Known")[1]
    for settings in (lambda: Lookahead(ngram=1), lambda: Lookup(min_ngram=4), lambda: BeamTree(beams=0)):
        with pytest.raises(ValueError, match="is 1|is 0|is above"):
            settings()
