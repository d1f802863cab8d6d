"""Proposals against the draft run from scratch along every path."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import draftwood as dw
from draftwood.decode.propose import DynamicTree, make_proposer, resolve_tree
from draftwood.decode.propose.dynamic import DynamicProposer, rerank

LENGTHS = [5, 3]


@pytest.fixture(params=[None, 20], ids=["whole vocabulary", "reduced vocabulary"])
def drafting(request, targets, tiny):
    """A draft, prompts of two lengths with features and roots, and the reference: log-probabilities after a path."""
    target = targets("llama")
    torch.manual_seed(1)
    vocab = None if request.param is None else torch.randperm(tiny.VOCAB)[: request.param]
    draft = dw.EagleDraft.from_target(target, draft_vocab=vocab).eval()
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4 if "attn" in name else 2)  # what a node attends to must show in its choices
    ids = tiny.prompt_ids((2, max(LENGTHS)), seed=5)
    features = torch.randn(2, max(LENGTHS), target.hidden_dim)
    roots = torch.tensor([7, 9])

    @torch.no_grad()
    def log_probs(row: int, path: list[int], rows=None) -> torch.Tensor:
        read = rows or list(
            zip(features[row, : LENGTHS[row]], [*ids[row, 1 : LENGTHS[row]].tolist(), int(roots[row])], strict=True)
        )
        state = draft.new_state(1)
        f = torch.stack([feature for feature, _ in read])[None]
        out = draft.extend(state, f, torch.tensor([[token for _, token in read]]))[:, -1:]
        for token in path:
            out = draft.extend(state, out, torch.tensor([[token]]))
        scores = torch.full((tiny.VOCAB,), -torch.inf)
        known = slice(None) if draft.draft_vocab is None else draft.draft_vocab
        scores[known] = draft.logits(out)[0, 0].log_softmax(-1)
        return scores

    return draft, (ids, LENGTHS, features, roots), log_probs


def start(draft, prompts, tree):
    proposer = make_proposer(draft, tree)
    with torch.no_grad():
        proposer.start(*prompts)
    return proposer


def propose(proposer, max_depth=99):
    with torch.no_grad():
        return proposer.propose(max_depth)


@pytest.mark.parametrize("name", ["chain-3", "stree", "eagle-25"])
def test_static_tree_holds_the_drafts_choices_in_order_at_every_node(drafting, name):
    draft, prompts, log_probs = drafting
    proposal = propose(start(draft, prompts, name))
    assert proposal.tokens[:, 0].tolist() == prompts[-1].tolist()
    for row, tokens in enumerate(proposal.tokens.tolist()):
        for node, below in enumerate(proposal.tree.children()):
            path = [tokens[n] for n in proposal.tree.path(node)[1:]]
            want = log_probs(row, path).topk(len(below)).indices.tolist()
            assert [tokens[child] for child in below] == want


def grow_by_hand(log_probs, row, tree, levels):
    """EAGLE-2 with plain lists: the kept nodes as paths, best first."""
    frontier, candidates = [((), 0.0)], []
    for _ in range(levels):
        level = []
        for path, score in frontier:
            top = log_probs(row, list(path)).topk(tree.top_k)
            level += [((*path, i), score + s) for s, i in zip(*map(torch.Tensor.tolist, top), strict=True) if s > -1e30]
        candidates += level
        frontier = sorted(level, key=lambda c: -c[1])[: tree.frontier]
    return {path for path, _ in sorted(candidates, key=lambda c: -c[1])[: tree.budget]}


@pytest.mark.parametrize(
    "tree, max_depth",
    [
        (DynamicTree(top_k=3, frontier=2, levels=4, budget=9), 99),
        (DynamicTree(top_k=4, frontier=4, levels=4, budget=40), 99),
        (DynamicTree(top_k=4, frontier=4, levels=3, budget=12), 2),
        (DynamicTree(top_k=2, frontier=4, levels=2, budget=50), 99),  # fewer candidates than the budget
        (DynamicTree(top_k=1, frontier=3, levels=4, budget=8), 99),  # a chain
        (DynamicTree(top_k=30, frontier=2, levels=2, budget=40), 99),  # more children than a small vocabulary has
    ],
)
def test_dynamic_tree_is_that_of_plain_lists(drafting, tree, max_depth):
    draft, prompts, log_probs = drafting
    proposal = propose(start(draft, prompts, tree), max_depth)
    for row, tokens in enumerate(proposal.tokens.tolist()):
        got = {tuple(tokens[n] for n in proposal.tree.path(node, row)[1:]) for node in range(1, len(tokens))}
        assert got == grow_by_hand(log_probs, row, tree, min(tree.levels, max_depth))
        assert len(got) == len(tokens) - 1 <= tree.budget


@pytest.mark.parametrize("tree", ["chain-4", "stree", DynamicTree(top_k=3, frontier=2, levels=3, budget=6)])
def test_depth_limit_is_kept_and_no_levels_is_the_root_alone(drafting, tree):
    draft, prompts, _ = drafting
    proposer = start(draft, prompts, tree)
    for limit in (2, 1, 0, 3):
        proposal = propose(proposer, limit)
        depth = int(proposal.tree.depth.max())
        assert depth == limit or (depth < limit == 3 and isinstance(tree, DynamicTree))
    assert propose(proposer, 0).tokens.tolist() == prompts[-1][:, None].tolist()


@pytest.mark.parametrize("tree", ["chain-2", "stree", DynamicTree(top_k=2, frontier=2, levels=3, budget=6)])
def test_after_a_commit_the_draft_has_read_the_targets_features_and_not_its_own(drafting, tree):
    draft, prompts, log_probs = drafting
    ids, lengths, features, roots = prompts
    proposer = start(draft, prompts, tree)
    rows = [
        list(zip(features[b, : lengths[b]], [*ids[b, 1 : lengths[b]].tolist(), int(roots[b])], strict=True))
        for b in range(2)
    ]
    generator = torch.Generator().manual_seed(0)
    current = roots.clone()
    accepted_drafts = [[2, 0], [0, 1], [1, None], [2, 2]]  # per step and row; None: the row does not advance
    for number, take in enumerate(accepted_drafts):
        proposal = propose(proposer)
        node_features = torch.randn(*proposal.tokens.shape, features.shape[-1], generator=generator)
        paths, new_roots = [], torch.tensor([11 + number, 23 + number])
        for b, accepted in enumerate(take):
            depth = proposal.tree.depth[b if proposal.tree.num_rows > 1 else 0]
            last = int((depth == (accepted or 0)).nonzero()[-1])
            path = [] if accepted is None else proposal.tree.path(last, b)
            paths.append(path)
            current[b] = new_roots[b] if path else current[b]
            following = [*proposal.tokens[b, path[1:]].tolist(), int(new_roots[b])]
            rows[b] += list(zip(node_features[b, path], following, strict=True)) if path else []
        with torch.no_grad():
            proposer.advance(proposal.tokens, node_features, paths, new_roots)
        proposal = propose(proposer)
        assert proposal.tokens[:, 0].tolist() == current.tolist()
        for b in range(2):
            children = proposal.tokens[b, proposal.tree.children(b)[0]]
            top = log_probs(b, [], rows[b]).topk(len(children)).indices
            assert children.tolist() == top.tolist()


@st.composite
def candidates(draw):
    """Parents and scores as a draft makes them, with many exact ties and impossible tokens."""
    size = draw(st.integers(1, 40))
    parents, scores = [], []
    for node in range(size):
        parent = draw(st.integers(-1, node - 1))
        step = draw(st.sampled_from([0.0, 0.0, -0.5, -1.0, -float("inf")]))
        parents.append(parent)
        scores.append((scores[parent] if parent >= 0 else 0.0) + step)
    return parents, scores


@settings(max_examples=200, deadline=None)
@given(candidates(), st.integers(1, 50))
def test_reranking_leaves_no_orphan_keeps_the_budget_and_the_best(case, budget):
    parents, scores = case
    tree, kept = rerank(torch.tensor([parents]), torch.tensor([scores]), budget, levels=len(parents))
    kept = kept[0].tolist()
    assert tree.num_nodes == 1 + min(budget, len(parents))
    assert dw.Tree.from_parents(tree.rows[0]).num_nodes == tree.num_nodes  # one root, parents first
    for node, candidate in enumerate(kept, 1):
        above = tree.rows[0][node]
        assert (kept[above - 1] if above else -1) == parents[candidate]
    dropped = [scores[c] for c in range(len(parents)) if c not in kept]
    assert not dropped or min(scores[c] for c in kept) >= max(dropped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_child_outranks_its_parent_however_sure_the_draft_is(dtype):
    """Logits whose largest leads by 0 to 50: around 17 the others are rounded away in float32."""
    proposer = DynamicProposer(SimpleNamespace(draft_vocab=None, logits=lambda outputs: outputs))
    generator = torch.Generator().manual_seed(0)
    for vocab in (2, 7, 64, 1001):
        logits = 30 * torch.randn(1, 51, 1, generator=generator) + torch.randn(1, 51, vocab, generator=generator)
        logits[0, :, 0] = logits.amax(-1)[0] + torch.arange(51)
        above = -torch.rand(1, 51, generator=generator)
        ids, scores = proposer.children(logits.to(dtype), above, 2)
        assert (scores <= above[:, :, None]).all() and (scores[0, -20:, 0] == above[0, -20:]).all()
        assert (ids[0, 20:, 0] == 0).all()


def test_a_tree_per_row_is_refused_for_a_draft(drafting):
    with pytest.raises(ValueError, match="one tree for all rows"):
        make_proposer(drafting[0], dw.Tree.from_parents([[-1, 0], [-1]]))


def test_more_children_than_the_draft_has_tokens_is_refused(drafting):
    draft, prompts, _ = drafting
    with pytest.raises(ValueError, match="62 children"):
        propose(start(draft, prompts, dw.Tree.from_parents([-1, *[0] * 62])))


@pytest.mark.parametrize("budget", [1, 2, 8, 16, 60, 200])
def test_settings_of_a_budget_can_fill_it(budget):
    settings = resolve_tree(f"dynamic-{budget}")
    candidates = settings.top_k + (settings.levels - 1) * settings.frontier * settings.top_k
    assert settings.budget == budget and candidates >= budget
    assert settings.levels <= 6 and settings.top_k <= 10
