"""Sums over rows and what is reported of them.

All figures are on the data's own tokens. `top1` of align step j: how often the draft's first choice is the target's
greedy token. The acceptance length is that of a chain of J drafts, joint survival + 1: the draft starts at a row, is
right at step 1 there, at step 2 in the next row, and so on.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.distill_loss import DistillWeights
from draftwood.train.batches import Batch
from draftwood.train.losses import StepOutput

# Columns of a meter: sums of the loss terms, of first and of top-3 hits, the rows, and chains alive and begun.
_TERMS = ("feature", "ce", "topk", "acceptance")
_COLUMNS = (*_TERMS, "top1", "top3", "rows", "alive", "chains")


@dataclass(frozen=True)
class AlignMetrics:
    """Means over supervised rows, and the joint survival of a chain at this depth; `acceptance` is the loss term."""

    feature: float
    ce: float
    topk: float
    acceptance: float
    top1: float
    top3: float
    survival: float


@dataclass(frozen=True)
class Metrics:
    loss: float
    acceptance_length: float
    num_rows: int
    align: tuple[AlignMetrics, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def flat(self, prefix: str) -> dict[str, float]:
        """`prefix/loss`, `prefix/top1_2` and so on, as trackers want it."""
        values = {f"{prefix}/loss": self.loss, f"{prefix}/acceptance_length": self.acceptance_length}
        for j, step in enumerate(self.align, 1):
            values |= {f"{prefix}/{name}_{j}": value for name, value in asdict(step).items()}
        return values


class Meter:
    """Adds up steps. `sums` [J, 9] float64 is all its state: processes are reduced by adding it."""

    def __init__(self, steps: int, device: torch.device):
        self.sums = torch.zeros(steps, len(_COLUMNS), dtype=torch.float64, device=device)

    def add(self, out: StepOutput, batch: Batch) -> None:
        alive, chains = chain_survival(out.ranks == 0, out.places, batch.supervised[:, :-2])
        columns = [
            *out.parts.detach().unbind(-1),
            (out.ranks < 1).sum(-1),
            (out.ranks < 3).sum(-1),
            torch.full_like(alive, out.ranks.shape[1]),
            alive,
            chains,
        ]
        # a step may have fewer align steps than the meter
        self.sums[: len(alive)] += torch.stack([column.double() for column in columns], -1)

    def reset(self) -> None:
        self.sums.zero_()


def summarise(sums: Tensor, weights: DistillWeights) -> Metrics:
    """Means from a meter's sums [J, 9], of the align steps that it has seen."""
    align: list[AlignMetrics] = []
    for row in sums.tolist():
        named = dict(zip(_COLUMNS, row, strict=True))
        if align and not named["rows"]:
            break
        rows = max(named["rows"], 1.0)
        survival = named["alive"] / max(named["chains"], 1.0)
        means = {name: named[name] / rows for name in (*_TERMS, "top1", "top3")}
        align.append(AlignMetrics(**means, survival=survival))
    loss = sum(
        weights.of_step(j) * sum(getattr(weights, name) * getattr(a, name) for name in _TERMS)
        for j, a in enumerate(align)
    )
    return Metrics(loss, 1.0 + sum(a.survival for a in align), int(sums[0, _COLUMNS.index("rows")]), tuple(align))


def chain_survival(hits: Tensor, places: Tensor, supervised: Tensor) -> tuple[Tensor, Tensor]:
    """Chains still right at each depth and chains that reach it within their reply, both [J] int64.

    Args:
        hits: [J, R] bool, step j is right in the row.
        places: [R] where the rows lie in `supervised` [B, T], flattened.
    """
    grid = torch.zeros(len(hits), supervised.numel(), dtype=torch.bool, device=hits.device)
    grid[:, places] = hits
    grid = grid.view(-1, *supervised.shape)
    begun = supervised.clone()
    alive = supervised.clone()
    counts = []
    for depth, hit in enumerate(grid):
        # the chain that begins at row t is at row t + depth now
        begun = begun[:, : begun.shape[1] - (depth > 0)] & supervised[:, depth:]
        alive = alive[:, : begun.shape[1]] & begun & hit[:, depth:]
        counts.append((alive.sum(), begun.sum()))
    return torch.stack([a for a, _ in counts]), torch.stack([b for _, b in counts])
