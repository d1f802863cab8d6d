"""A tree drawn from the draft's own distribution, children without replacement: for sampling, not for greedy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from draftwood.decode.propose.base import DraftProposer, Proposal, root_proposal
from draftwood.decode.propose.frontier import Frontier
from draftwood.decode.sampled import Draws, draw_without_replacement
from draftwood.decode.tree import Tree

if TYPE_CHECKING:
    from draftwood.decode.propose.base import Drafter


@dataclass(frozen=True)
class SampledTree:
    """Settings.

    Attributes:
        widths: children drawn below a node, for each level of the tree.
        frontier: nodes of a level, those likeliest to the draft, that get children; None: as many as the root has.

    Raises:
        ValueError: no level, or a setting below 1.
    """

    widths: tuple[int, ...] = (3, 3, 3, 3)
    frontier: int | None = None

    def __post_init__(self) -> None:
        if min(self.widths, default=0) < 1:
            raise ValueError(f"sampled tree: widths are {self.widths}; expected one or more, each 1 or more")
        if self.frontier is not None and self.frontier < 1:
            raise ValueError(f"sampled tree: frontier is {self.frontier}; expected 1 or more")


def check_temperature(settings: object, temperature: float) -> None:
    """Raises:
    ValueError: a sampled tree at a temperature of 0, at which nothing is drawn.
    """
    if isinstance(settings, SampledTree) and not temperature > 0:
        raise ValueError(
            f"a sampled tree draws its tokens, but the temperature is {temperature}: set one above 0, or use a "
            "tree without chance for greedy decoding, as 'dynamic'"
        )


class SampledProposer(DraftProposer):
    """Draws a tree per row, one draft forward per level below the first.

    Which nodes get children depends on tokens drawn before theirs, never on theirs: a node's children
    are always a fresh draw from q, as the acceptance rule requires.

    Raises:
        ValueError: a temperature of 0, at which nothing is drawn.
    """

    def __init__(
        self,
        draft: "Drafter",
        settings: SampledTree,
        temperature: float,
        generator: torch.Generator | None = None,
    ):
        super().__init__(draft)
        check_temperature(settings, temperature)
        self.settings = settings
        self.temperature = temperature
        self.generator = generator

    def propose(self, max_depth: int) -> Proposal:
        levels = self.bounded(min(len(self.settings.widths), max_depth))
        if levels < 1:
            return root_proposal(self.roots)
        frontier = Frontier(self.draft, self.state, self.head_row)
        above = torch.zeros_like(self.roots, dtype=torch.float32)[:, None]  # cumulative log-probabilities: [B, f]
        index = torch.zeros_like(self.roots)[:, None]  # which nodes the frontier is: [B, f]
        tokens, parents = [self.roots[:, None]], [torch.full_like(index, -1)]
        log_qs, expanded = [], []
        num_nodes = 1
        for depth, width in enumerate(self.settings.widths[:levels], 1):
            logits = self.draft.logits(frontier.outputs).float()
            # The largest becomes 0, so that no temperature, however small, makes an infinity of it.
            log_q = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).log_softmax(-1)
            k = min(width, log_q.shape[-1])
            drawn = draw_without_replacement(log_q, k, self.generator)  # [B, f, k]
            ids = drawn if self.draft.draft_vocab is None else self.draft.draft_vocab[drawn]
            tokens.append(ids.flatten(1))
            parents.append(index.repeat_interleave(k, dim=1))
            log_qs.append(log_q)
            expanded.append(index)
            if depth == levels:
                break
            scores = (above[:, :, None] + log_q.gather(2, drawn)).flatten(1)
            above, best = scores.topk(min(self.settings.frontier or self.settings.widths[0], scores.shape[1]), dim=1)
            index = best + num_nodes
            num_nodes += scores.shape[1]
            frontier.descend(best // k, tokens[-1].gather(1, best))
        tree = Tree(torch.cat(parents, 1), max_depth=levels)
        inner = torch.cat(expanded, 1)
        slot = torch.zeros_like(tree.parents)
        slot.scatter_(1, inner, torch.arange(inner.shape[1], device=inner.device).expand_as(inner))
        draws = Draws(torch.cat(log_qs, 1), slot, max(self.settings.widths[:levels]), self.draft.draft_vocab)
        return Proposal(torch.cat(tokens, 1), tree, draws)
