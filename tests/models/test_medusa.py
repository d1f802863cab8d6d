"""Medusa heads: the rows they are trained on are those they decode from, and they change no output."""

import pytest
import tiny_run
import torch

import draftwood as dw
from draftwood.decode.propose import make_proposer
from draftwood.models.medusa import MedusaDraft
from draftwood.train.loop import distill


def make(tiny, family="bamba", num_heads=3, seed=0):
    torch.manual_seed(seed)
    draft = MedusaDraft.from_target(tiny.target(family), num_heads=num_heads).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(std=0.3)
    return draft


@pytest.fixture(scope="session")
def tiny():
    import tiny

    return tiny


def test_an_untrained_head_gives_the_feature_back(tiny):
    draft = MedusaDraft.from_target(tiny.target("llama"))
    features = torch.randn(2, 5, 32)
    assert torch.equal(draft.extend(draft.new_state(2), features, tiny.prompt_ids((2, 5))), features)


@torch.no_grad()
def test_an_align_step_is_what_decoding_computes_from_the_last_feature_it_has(tiny):
    draft, features, ids = make(tiny), torch.randn(2, 9, 32), tiny.prompt_ids((2, 9))
    outputs = draft.align(features, ids, steps=3)
    for row in range(4, 9):
        for step in (1, 2, 3):
            state = draft.new_state(2)
            read = row - (step - 1) + 1
            out = draft.extend(state, features[:, :read], ids[:, :read])[:, -1:]
            for depth in range(1, step):
                out = draft.expand(state, out, ids[:, :1], depth, torch.ones(1, 1, depth, dtype=torch.bool))
            torch.testing.assert_close(out[:, 0], outputs[step - 1][:, row])
    with pytest.raises(ValueError, match="4 align steps, but the draft has 3 heads"):
        draft.align(features, ids, steps=4)


@torch.no_grad()
def test_the_tree_is_a_part_of_the_product_of_the_heads_choices(tiny):
    draft = make(tiny)
    features, ids, roots = torch.randn(2, 6, 32), tiny.prompt_ids((2, 6)), torch.tensor([5, 6])
    proposer = make_proposer(draft, "stree")
    proposer.start(ids, [6, 4], features, roots)
    proposal = proposer.propose(9)
    assert proposal.tree.max_depth == 3  # as many levels as heads
    for b, last in enumerate([5, 3]):
        top = [draft.logits(head(features[b, last])).topk(3).indices.tolist() for head in draft.heads]
        for node, below in enumerate(proposal.tree.children()):
            depth = len(proposal.tree.path(node)) - 1
            assert proposal.tokens[b, below].tolist() == (top[depth][: len(below)] if below else [])
    node_features = torch.randn(*proposal.tokens.shape, 32)
    proposer.advance(proposal.tokens, node_features, [[0, 2], []], torch.tensor([8, 9]))
    proposal = proposer.propose(9)
    for b, feature in enumerate([node_features[0, 2], features[1, 3]]):
        top = draft.logits(draft.heads[1](feature)).topk(2).indices.tolist()
        assert proposal.tokens[b, [4, 5]].tolist() == top


@pytest.mark.parametrize("tree", ["chain-4", "stree", "beam-3x4", "dynamic-8", "product-3x2x2"])
def test_output_of_ragged_rows_is_that_of_transformers(tree, tiny):
    target, draft = tiny.target("bamba"), make(tiny)
    rows = [tiny.prompt_ids((1, n), n) for n in (6, 2, 4)]
    ids = torch.cat([torch.nn.functional.pad(row, (6 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (6 - row.shape[1], 0)) for row in rows])
    out = dw.generate(target, draft, ids, attention_mask=mask, tree=tree, max_new_tokens=16)
    assert out.tokens == [tiny.greedy(target.model, row, 16) for row in rows]


def test_heads_are_trained_by_the_same_loop_their_loss_falls_and_they_load_again(tiny, tmp_path):
    tiny_run.make(tmp_path)
    settings = [
        "draft.kind=medusa",
        "draft.num_heads=3",
        "align.steps=3",
        "align.feature_weight=0",
        "optimizer.lr=0.01",
    ]
    settings += ["align.ce_weight=1", "align.topk_weight=0", "loop.epochs=4", "loop.log_every=1", f"output={tmp_path}"]
    target = dw.load_target(str(tmp_path / "target"))
    best = distill(tiny_run.config(tmp_path, *settings), target)
    draft = dw.load_draft(best, target)
    assert draft.kind == "medusa" and len(draft.heads) == 3
    ids = tiny.prompt_ids((4, 24), 9)
    features = target.features(ids)

    def loss(draft, step):
        out = draft.align(features[:, :-1], ids[:, 1:], steps=3)[step][:, step:-1]
        p = target.head(features[:, step + 1 : -1]).softmax(-1)
        return -(p * draft.logits(out).log_softmax(-1)).sum(-1).mean()

    fresh = MedusaDraft.from_target(target, num_heads=3)
    with torch.no_grad():
        for step in range(3):
            assert loss(draft, step) < loss(fresh, step)
    want = tiny.greedy(target.model, ids[:1, :7], 12)
    assert dw.generate(target, draft, ids[:1, :7], max_new_tokens=12, tree="stree").tokens == [want]
