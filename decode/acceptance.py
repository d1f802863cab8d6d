"""Which child of a node was the target's token, by depth and rank, observed while decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from draftwood.decode.generate import generate
from draftwood.decode.optimal_tree import decreasing
from draftwood.decode.propose import Proposal, Proposer, make_proposer
from draftwood.decode.propose.base import LogitsReader
from draftwood.models.tree import Tree

if TYPE_CHECKING:
    from draftwood.models.target import Target

LEVELS, RANKS = 6, 8


def wide_tree() -> Tree:
    """8 children below the root and below the likeliest nodes of each level, fewer the deeper: 80 draft nodes."""
    parents, level = [-1], [(0, 0)]
    for width in (1, 3, 2, 2, 1, 1):
        below = []
        for node, loss in sorted(level, key=lambda entry: entry[1])[:width]:
            for rank in range(RANKS):
                parents.append(node)
                below.append((len(parents) - 1, loss + rank))
        level = below
    return Tree.from_parents(parents)


@dataclass
class Observation:
    """What one prompt showed.

    Attributes:
        hits: [LEVELS, RANKS], nodes whose child of that rank was the target's token.
        trials: [LEVELS, RANKS], nodes that had a child of that rank.
        orders: for each step of a dynamic tree and each bound on the depth, the places of the kept nodes in the order
            of score among the nodes down to there.
        steps: of each step the nodes of its tree and how many of them were kept, the root among both.
    """

    hits: np.ndarray = field(default_factory=lambda: np.zeros((LEVELS, RANKS)))
    trials: np.ndarray = field(default_factory=lambda: np.zeros((LEVELS, RANKS)))
    orders: list[list[list[int]]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)


class _Observer:
    """A strategy, watched. One row."""

    def __init__(self, inner: Proposer, observation: Observation):
        self.inner, self.observation = inner, observation
        self.max_length = inner.max_length

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        self.inner.start(input_ids, lengths, features, roots)

    def propose(self, max_depth: int) -> Proposal:
        self.is_whole = max_depth >= LEVELS
        self.proposal = self.inner.propose(max_depth)
        return self.proposal

    def advance(self, tokens: Tensor, features: Tensor, paths: list[list[int]], roots: Tensor) -> None:
        if self.is_whole and paths[0]:
            self.observation.steps.append((self.proposal.tree.num_nodes, len(paths[0])))
            self._count(self.proposal.tree, paths[0])
        self.inner.advance(tokens, features, paths, roots)

    def read_logits(self, logits: Tensor) -> None:
        if isinstance(self.inner, LogitsReader):
            self.inner.read_logits(logits)

    def _count(self, tree: Tree, path: list[int]) -> None:
        children = tree.children()
        for depth, node in enumerate(path[:LEVELS]):
            below = children[node][:RANKS]
            self.observation.trials[depth, : len(below)] += 1
            if depth + 1 < len(path) and path[depth + 1] in below:
                self.observation.hits[depth, below.index(path[depth + 1])] += 1
        depths = tree.depth[0].numpy()
        self.observation.orders.append(
            [
                [int((depths[1 : node + 1] <= levels).sum()) for node in path[1 : levels + 1]]
                for levels in range(1, LEVELS + 1)
            ]
        )


def observe(
    target: "Target",
    draft: Any,
    prompts: Sequence[Tensor],
    tree: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Observation]:
    """Decodes each prompt [1, T] with `tree`; what was seen, prompt by prompt."""
    seen = []
    for number, ids in enumerate(prompts):
        observation = Observation()
        inner = make_proposer(draft, tree, temperature)
        assert inner is not None, "a draft and no strategy"
        generate(
            target,
            _Observer(inner, observation),
            ids.to(target.device),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed + number,
        )
        seen.append(observation)
    return seen


def acceptance_table(seen: Sequence[Observation]) -> list[list[float]]:
    """[LEVELS][RANKS] probabilities, not increasing with the rank; a depth never reached takes the one above."""
    hits, trials = sum(o.hits for o in seen), sum(o.trials for o in seen)
    table: list[list[float]] = []
    for depth in range(LEVELS):
        if trials[depth].max() == 0:  # type: ignore[index]
            table.append(list(table[-1]) if table else [0.0] * RANKS)
            continue
        rates = hits[depth] / np.maximum(trials[depth], 1)  # type: ignore[index]
        table.append(decreasing(rates.tolist(), trials[depth].tolist()))  # type: ignore[index]
    return table


def dynamic_tokens(seen: Sequence[Observation], budget: int, levels: int) -> float:
    """Tokens per step of a dynamic tree cut to its `budget` best nodes down to `levels`, from those of larger ones."""
    kept = [sum(place <= budget for place in orders[levels - 1]) for o in seen for orders in o.orders]
    return 1 + sum(kept) / len(kept) if kept else 1.0
