"""What strategies that draft from tokens alone have in common: each row's text, and trees made of guessed paths."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftwood.decode.propose.base import Proposal
from draftwood.decode.tree import Tree
from draftwood.models.transfer import send


class TextProposer(ABC):
    """Keeps `texts`, each row's prompt and output, the root last. Runs no model and reads no features."""

    max_length: int | None = None

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        rows = zip(input_ids.tolist(), lengths, roots.tolist(), strict=True)
        self.texts = [[*ids[:length], root] for ids, length, root in rows]
        self.roots = roots

    @abstractmethod
    def propose(self, max_depth: int) -> Proposal: ...

    def advance(self, tokens: Tensor, features: Tensor, paths: list[list[int]], roots: Tensor) -> None:
        rows = torch.cat([tokens, roots[:, None]], 1).tolist()
        for text, row, path in zip(self.texts, rows, paths, strict=True):
            if path:
                text += [*(row[node] for node in path[1:]), row[-1]]
        moved = send([bool(path) for path in paths], roots.device)
        self.roots = torch.where(moved, roots, self.roots)


class Branches:
    """One row's tree while it grows: guessed paths below the root, what they share held once."""

    def __init__(self, root: int):
        self.parents, self.tokens = [-1], [root]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, path: Iterable[int], below: int = 0) -> int:
        """Adds tokens one under the other below a node, going along nodes that are there; returns the last one."""
        node = below
        for token in path:
            if (node, token) not in self._children:
                self.parents.append(node)
                self.tokens.append(token)
                self._children[node, token] = len(self.tokens) - 1
            node = self._children[node, token]
        return node


def as_proposal(rows: Sequence[Branches], device: torch.device) -> Proposal:
    """The rows' trees as one proposal, shorter ones padded."""
    tree = Tree.from_parents([row.parents for row in rows])
    padded = [row.tokens + [0] * (tree.num_nodes - len(row.tokens)) for row in rows]
    return Proposal(send(padded, device), tree)
