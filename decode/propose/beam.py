"""The tree of a beam search: its beams at every step, united (STree, arXiv 2505.14969)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from draftwood.decode.propose.base import DraftProposer, Proposal, root_proposal
from draftwood.decode.propose.frontier import Frontier
from draftwood.decode.tree import Tree

if TYPE_CHECKING:
    from draftwood.decode.propose.base import Drafter


@dataclass(frozen=True)
class BeamTree:
    """Settings; the defaults are STree's.

    Attributes:
        beams: paths kept at every step, those of the highest cumulative log-probability.
        levels: steps, the depth of the tree.

    Raises:
        ValueError: a setting below 1.
    """

    beams: int = 3
    levels: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"beam tree: {name} is {value}; expected 1 or more")


class BeamProposer(DraftProposer):
    """Grows a tree per row, `beams` nodes a level, one draft forward per level below the first.

    A beam that was given up stays in the tree as far as it went: it costs no more than its nodes.
    """

    def __init__(self, draft: "Drafter", settings: BeamTree | None = None):
        super().__init__(draft)
        self.settings = settings or BeamTree()

    def propose(self, max_depth: int) -> Proposal:
        levels = self.bounded(min(self.settings.levels, max_depth))
        if levels < 1:
            return root_proposal(self.roots)
        frontier = Frontier(self.draft, self.state, self.head_row)
        scores = torch.zeros_like(self.roots, dtype=torch.float32)[:, None]  # of the beams: [B, f]
        tokens, parents = [self.roots[:, None]], [torch.full_like(self.roots, -1)[:, None]]
        first = 0  # node of the frontier's first beam
        for depth in range(1, levels + 1):
            ids, candidates = self.children(frontier.outputs, scores, self.settings.beams)  # [B, f, k]
            flat = candidates.flatten(1)
            scores, best = flat.topk(min(self.settings.beams, flat.shape[1]), dim=1)
            source = best // ids.shape[-1]
            tokens.append(ids.flatten(1).gather(1, best))
            parents.append(first + source)
            first += parents[-2].shape[1]
            if depth < levels:
                frontier.descend(source, tokens[-1])
        return Proposal(torch.cat(tokens, 1), Tree(torch.cat(parents, 1), max_depth=levels))
