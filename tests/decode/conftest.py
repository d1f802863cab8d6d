"""The tiny models, and a drafting strategy whose right answer is known."""

import random

import pytest
import tiny as tiny_models
import torch
from torch import Tensor

import draftwood as dw
from draftwood.decode.propose import Proposal


@pytest.fixture(scope="session")
def tiny():
    return tiny_models


@pytest.fixture(scope="session")
def targets():
    """`targets(family)`: the target, built once."""
    return tiny_models.target


class Oracle:
    """A strategy that knows each row's continuation and hides it in a random tree, seldom on the left-most path.

    A share of the steps has no drafts, a wrong token somewhere on the path, or a tree of its own per row with padding.
    """

    max_length = None

    def __init__(self, continuations: list[list[int]], seed: int = 0, error_rate: float = 0.0, empty_rate: float = 0.0):
        self.continuations = continuations
        self.random = random.Random(seed)
        self.error_rate, self.empty_rate = error_rate, empty_rate
        self.done = [1] * len(continuations)
        self.off_left = self.without_drafts = 0

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        assert features.shape[:2] == input_ids.shape and max(lengths) == input_ids.shape[1]
        self.roots = roots

    def propose(self, max_depth: int) -> Proposal:
        if self.random.random() < self.empty_rate:
            self.without_drafts += 1
            return Proposal(self.roots[:, None], dw.Tree.from_parents([-1]))
        rows = [self._row(b, max_depth) for b in range(len(self.continuations))]
        tree = dw.Tree.from_parents([parents for parents, _ in rows])
        tokens = torch.zeros(len(rows), tree.num_nodes, dtype=torch.int64)
        for b, (_, row) in enumerate(rows):
            tokens[b, : len(row)] = torch.tensor(row)
        return Proposal(tokens, tree)

    def _row(self, b: int, max_depth: int) -> tuple[list[int], list[int]]:
        parents, tokens, node = [-1], [int(self.roots[b])], 0
        for token in self.continuations[b][self.done[b] :][: self.random.randint(1, 4)][:max_depth]:
            if self.random.random() < self.error_rate:
                token = (token + 1) % 61
            for _ in range(self.random.randint(0, 2)):  # wrong elder siblings
                parents.append(node)
                tokens.append((token + 7) % 61)
            self.off_left += parents[-1] == node
            parents.append(node)
            tokens.append(token)
            node = len(parents) - 1
        return parents, tokens

    def advance(self, tokens: Tensor, features: Tensor, paths: list[list[int]], roots: Tensor) -> None:
        self.done = [done + len(path) for done, path in zip(self.done, paths, strict=True)]
        self.roots = roots


@pytest.fixture
def oracle():
    return Oracle
