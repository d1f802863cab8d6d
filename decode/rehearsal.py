"""A drafting strategy with a script: it knows the text and has a given number of its drafts accepted at every step.

For checks of the verifier that do not depend on how good a draft is. The right tokens hang in the tree as younger
siblings of wrong ones, so that the accepted path is never the left-most, and below the last right one there are only
wrong ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.decode.propose import Proposal
from draftwood.models.tree import Tree, root_tree

# Drafts accepted in the steps that have drafts, at least as many as any conv is wide; row b starts b steps further on.
SCRIPT = (3, 0, 1, 2, 5, 4)


def tokens_needed(rows: int, steps: int) -> int:
    """Length of the texts for so many target forwards, with a spare block."""
    turns = range((steps + 1) // 2 + 1)
    return 2 + steps + max(sum(SCRIPT[(turn + b) % len(SCRIPT)] for turn in turns) for b in range(rows))


class Rehearsal:
    """Every second step has no drafts (a step without after one that accepted some is where stale states show).

    Args:
        texts: for each row the tokens to come, the root's successor first being texts[b][1].
        vocab_size: of the target.
    """

    max_length: int | None = None

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int):
        self.texts, self.vocab_size = texts, vocab_size

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        self.roots, self.done, self.step = roots, [1] * len(self.texts), 0

    def propose(self, max_depth: int) -> Proposal:
        turn, has_none = divmod(self.step, 2)
        self.step += 1
        if has_none:
            return Proposal(self.roots[:, None], root_tree())
        rows = [self._row(b, min(SCRIPT[(turn + b) % len(SCRIPT)], max_depth)) for b in range(len(self.done))]
        tree = Tree.from_parents([parents for parents, _ in rows])
        tokens = torch.zeros(len(rows), tree.num_nodes, dtype=torch.int64)
        for b, (_, row) in enumerate(rows):
            tokens[b, : len(row)] = torch.tensor(row)
        tokens = tokens.to(self.roots.device)
        tokens[:, 0] = self.roots
        return Proposal(tokens, tree)

    def _row(self, b: int, accepted: int) -> tuple[list[int], list[int]]:
        parents, tokens, node = [-1], [0], 0
        text = self.texts[b][self.done[b] :]
        for token in text[:accepted]:
            parents += [node, node]
            tokens += [(token + 1) % self.vocab_size, token]
            node = len(parents) - 1
        if len(text) > accepted:
            parents.append(node)
            tokens.append((text[accepted] + 1) % self.vocab_size)
        return parents, tokens

    def advance(self, tokens: Tensor, features: Tensor, paths: list[list[int]], roots: Tensor) -> None:
        self.done = [done + len(path) for done, path in zip(self.done, paths, strict=True)]
        self.roots = roots
