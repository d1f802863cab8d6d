"""The step of fixed shapes does what verify and commit do; without a GPU the same code runs eagerly."""

import random

import pytest
import tiny
import torch
from trees import random_path

import draftwood as dw
from draftwood.models.graph import GraphStep

FORESTS = [[-1, 0, 0, 1, 1, 3], [-1], [-1, 0, 1, 2], [-1, 0, 0, 0, 0, 0, 0], [-1, 0, 1, 1]]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fixed_shapes_change_nothing(family, batch):
    target, rng = tiny.target(family), random.Random(batch)
    prompt = tiny.prompt_ids((batch, 5))
    mask = torch.ones_like(prompt)
    mask[batch - 1, :2] = 0 if batch > 1 else 1
    plain, fixed = target.prefill(prompt, mask), target.prefill(prompt, mask)
    step = GraphStep(target, fixed, capacity=40, max_nodes=8, max_depth=4)
    for turn, parents in enumerate(FORESTS):
        tree, tokens = dw.Tree.from_parents(parents), tiny.prompt_ids((batch, len(parents)), turn)
        want, got = target.verify(plain, tokens, tree), step.verify(tokens, tree)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.features, want.features, rtol=1e-4, atol=1e-5)
        paths = [random_path(parents, rng) for _ in range(batch)]
        target.commit(plain, paths)
        step.commit(paths)
        assert fixed.lengths == plain.lengths
    token = tiny.prompt_ids((batch, 1), 9)[:, 0]
    want, got = target.step(plain, token), target.step(fixed, token)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_the_fixed_shapes_is_named():
    target = tiny.target("bamba")
    state = target.prefill(tiny.prompt_ids((1, 5)))
    with pytest.raises(ValueError, match="capacity 4 is less than the 5 tokens"):
        GraphStep(target, state, capacity=4, max_nodes=4, max_depth=2)
    step = GraphStep(target, state, capacity=6, max_nodes=4, max_depth=2)
    ids = tiny.prompt_ids((1, 5))
    with pytest.raises(ValueError, match="4 nodes and depth 2, the tree has 5 and 4"):
        step.verify(ids, dw.Tree.chain(4))
    with pytest.raises(ValueError, match="fixed to 6 tokens and holds 5; a path of 3 does not fit"):
        step.verify(ids[:, :3], dw.Tree.chain(2))
    with pytest.raises(ValueError, match="commit without a verify"):
        step.commit([[0]])
