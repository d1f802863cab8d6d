"""A tree that grows where the draft is confident (EAGLE-2, arXiv 2406.16858): expand, then keep the best nodes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwood.decode.propose.base import DraftProposer, Proposal, root_proposal
from draftwood.decode.propose.frontier import Frontier
from draftwood.decode.tree import Tree

if TYPE_CHECKING:
    from draftwood.decode.propose.base import Drafter


@dataclass(frozen=True)
class DynamicTree:
    """Settings; the defaults are EAGLE-2's and HASS's.

    Attributes:
        top_k: children drafted below a node.
        frontier: nodes of a level, the likeliest ones, that get children.
        levels: depth of the tree.
        budget: draft nodes kept in the end, the root not counted.

    Raises:
        ValueError: a setting below 1.
    """

    top_k: int = 10
    frontier: int = 10
    levels: int = 6
    budget: int = 60

    @classmethod
    def of_budget(cls, budget: int) -> "DynamicTree":
        """Settings that go with a budget: a small tree needs neither 10 children nor 6 draft forwards."""
        width = max(2, min(10, budget // 2))
        return cls(top_k=width, frontier=width, levels=min(6, 1 + budget.bit_length()), budget=budget)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"dynamic tree: {name} is {value}; expected 1 or more")


def rerank(parents: Tensor, scores: Tensor, budget: int, levels: int) -> tuple[Tree, Tensor]:
    """The `budget` best candidates as one tree per row.

    A child's score is at most its parent's, and the sort is stable with parents before children, so of two equal scores
    the parent's comes first: no node is kept whose parent is not, and the kept ones are in topological order.

    Args:
        parents: [B, c] int64, the candidate that is the parent, before its child; -1 for the root.
        scores: [B, c] float32, cumulative log-probabilities.
        budget: candidates to keep; all where there are fewer.
        levels: bound on the depth.

    Returns:
        The tree and [B, n-1] int64, the candidates at its nodes below the root.
    """
    kept = scores.sort(dim=-1, descending=True, stable=True).indices[:, :budget]
    # Places shifted by one, so that parent -1 looks up the root, node 0.
    place = torch.zeros(parents.shape[0], parents.shape[1] + 1, dtype=torch.int64, device=parents.device)
    place.scatter_(1, kept + 1, torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept))
    below = place.gather(1, parents.gather(1, kept) + 1)
    return Tree(torch.cat([torch.full_like(below[:, :1], -1), below], dim=1), max_depth=levels), kept


class DynamicProposer(DraftProposer):
    """Grows a tree per row, one draft forward per level below the first, all on the draft's device.

    Attributes:
        levels: those of the settings; may be changed between steps.
    """

    def __init__(self, draft: "Drafter", settings: DynamicTree | None = None):
        super().__init__(draft)
        self.settings = settings or DynamicTree()
        self.levels = self.settings.levels

    def propose(self, max_depth: int) -> Proposal:
        levels = self.bounded(min(self.levels, max_depth))
        if levels < 1:
            return root_proposal(self.roots)
        frontier = Frontier(self.draft, self.state, self.head_row)
        above = torch.zeros_like(self.roots, dtype=torch.float32)[:, None]  # the frontier's scores: [B, f]
        index = torch.full_like(self.roots, -1)[:, None]  # which candidates they are: [B, f]
        ids, scores, parents = [], [], []
        num_candidates = 0
        for depth in range(1, levels + 1):
            level_ids, level_scores = self.children(frontier.outputs, above, self.settings.top_k)  # [B, f, k]
            k = level_ids.shape[-1]
            ids.append(level_ids.flatten(1))
            scores.append(level_scores.flatten(1))
            parents.append(index.repeat_interleave(k, dim=1))
            if depth == levels:
                break
            above, best = scores[-1].topk(min(self.settings.frontier, scores[-1].shape[1]), dim=1)
            index = best + num_candidates
            num_candidates += scores[-1].shape[1]
            frontier.descend(best // k, ids[-1].gather(1, best))
        tree, kept = rerank(torch.cat(parents, 1), torch.cat(scores, 1), self.settings.budget, levels)
        return Proposal(torch.cat([self.roots[:, None], torch.cat(ids, 1).gather(1, kept)], dim=1), tree)
