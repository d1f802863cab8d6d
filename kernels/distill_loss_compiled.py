"""The passes of `distill_loss_torch` over rows of logits, fused by `torch.compile`: the same values up to rounding.

One program serves every number of rows; a vocabulary, a dtype and the kind of acceptance term each have their own.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.distill_terms import DistillWeights, TeacherStatistics, wide


def probabilities_(logits: Tensor) -> TeacherStatistics:
    """As in `distill_loss_torch`."""
    first = logits.max(-1)
    return TeacherStatistics(_fused(_softmax_)(logits, first.values), first.indices)


def weigh_(
    drafts: Tensor,
    target: Tensor,
    greedy: Tensor,
    mass: Tensor,
    sayable: Tensor,
    weights: DistillWeights,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As in `distill_loss_torch`, whatever `with_grad` says."""
    if not weights.acceptance:
        found = [_fused(_weigh_)(draft, greedy, mass) for draft in drafts]
        normaliser, ranks = map(torch.stack, zip(*found, strict=True))
        return normaliser, ranks, torch.ones_like(normaliser), torch.zeros_like(normaliser)
    # A tensor, as another weight in another stage is no other program.
    weight = mass.new_tensor(weights.acceptance)
    settings = (greedy, mass, sayable, weight, weights.acceptance_eta)
    steps = [_fused(_weigh_and_accept_)(draft, target, *settings) for draft in drafts]
    normaliser, ranks, alpha, mix = map(torch.stack, zip(*steps, strict=True))
    return normaliser, ranks, alpha, mix


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    # Not fullgraph, with which a ninth dtype, vocabulary or term in one process is an error instead of torch's warning.
    return torch.compile(function, dynamic=True)


def _softmax_(logits: Tensor, largest: Tensor) -> Tensor:
    x, top = logits.to(wide(logits.dtype)), largest.to(wide(logits.dtype))[:, None]
    grown, total = _exponentials(x, top)
    logits.copy_(grown / total)
    return (top + torch.log(total))[:, 0]


def _weigh_(logits: Tensor, greedy: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    x = logits.to(wide(logits.dtype))
    ranks, top = _ranks(x, greedy), x.amax(-1, keepdim=True)
    grown, total = _exponentials(x, top)
    logits.copy_(grown * (mass[:, None] / total))
    return (top + torch.log(total))[:, 0], ranks


def _weigh_and_accept_(
    logits: Tensor, target: Tensor, greedy: Tensor, mass: Tensor, sayable: Tensor, weight: Tensor, eta: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = logits.to(wide(logits.dtype))
    ranks, top = _ranks(x, greedy), x.amax(-1, keepdim=True)
    grown, total = _exponentials(x, top)
    q, p = grown / total, target.to(x.dtype) * sayable[:, None]
    alpha, below = torch.minimum(q, p).sum(-1), torch.where(q < p, q, 0).sum(-1)
    if eta is None:
        mix = torch.zeros_like(alpha)
        slope = weight / alpha.clamp(min=torch.finfo(alpha.dtype).tiny)
    else:
        mix = torch.exp(-eta * alpha)
        slope = weight * (1 - mix)
    pull = mass + weight * mix + slope * below
    logits.copy_(q * pull[:, None] - torch.where(q < p, q * slope[:, None], 0))
    return (top + torch.log(total))[:, 0], ranks, alpha, mix


def _exponentials(x: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x - top) [n, V] and its sums [n, 1], from logits x and the largest of each row, top [n, 1]."""
    grown = torch.exp(x - top)
    return grown, grown.sum(-1, keepdim=True)


def _ranks(x: Tensor, greedy: Tensor) -> Tensor:
    """As in `DistillOutput`, from logits x [n, V]; the first of several largest wins, as with argmax."""
    place = greedy.clamp(min=0)[:, None]
    bar = x.gather(1, place)
    # Counted in floating point, which is exact for any vocabulary and fuses into vector instructions.
    before = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device) < place.to(x.dtype)
    above = (x > bar).to(x.dtype).sum(-1)
    ties = ((x == bar) & before).to(x.dtype).sum(-1)
    ranks = torch.where(above + ties == 0, 0, above.clamp(min=1)).long()
    return torch.where(greedy >= 0, ranks, x.shape[-1])
