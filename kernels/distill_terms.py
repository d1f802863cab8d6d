"""What the distillation loss is made of, its terms written out, and the plain form of them (HASS, EAGLE-3, LK losses).

Per row, with t = head(feature) and l = head(output) over the draft's vocabulary, q = softmax(l):

    feature     mean over D of SmoothL1(output, feature)
    ce          -sum_v r_v log q_v                r = softmax(t), over the draft's vocabulary
    topk        -sum_{v in top K} p_v log q_v     p = softmax over the target's vocabulary; the K best the draft can say
    acceptance  -log alpha, or lambda KL(r, q) + (1 - lambda) (1 - alpha) where eta is given;
                alpha = sum_v min(p_v, q_v),      lambda = exp(-eta alpha), a constant for the gradient

With a reduced draft vocabulary r is p restricted and renormalised, as EAGLE-3 trains, while p in the other terms keeps
the mass that it has for the target: rows whose likely tokens the draft cannot say count for little. Without, r = p.
alpha is how often rejection sampling keeps a token drawn from q, whatever the vocabulary of the draft.

HASS: arXiv 2408.15766. EAGLE-3: arXiv 2503.01840. LK losses: arXiv 2602.23881, whose mixture has eta = 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class DistillHead:
    """The target's frozen output layer as the loss needs it: `logits = scale * x @ weight.T`.

    Attributes:
        weight: [V, D], the whole vocabulary. Matrix products are in its dtype, softmax and sums in float32 or wider.
        draft_weight: [Vd, D], the rows the draft can say, in its order; `weight` itself without a reduced vocabulary.
        positions: [V] int64, place of a target token in the draft's vocabulary, -1 for none; None: not reduced.
        scale: the model's own factor on its logits.
    """

    weight: Tensor
    draft_weight: Tensor
    positions: Tensor | None
    scale: float

    @classmethod
    def build(
        cls, weight: Tensor, draft_vocab: Tensor | None = None, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> "DistillHead":
        """From the target's `weight` [V, D] and the draft's token ids `draft_vocab` [Vd] int64 (None: all of them)."""
        weight = weight.detach().to(dtype or weight.dtype)
        if draft_vocab is None:
            return cls(weight, weight, None, scale)
        positions = torch.full((weight.shape[0],), -1, device=weight.device)
        positions[draft_vocab] = torch.arange(len(draft_vocab), device=weight.device)
        return cls(weight, weight[draft_vocab].contiguous(), positions, scale)


@dataclass(frozen=True)
class DistillWeights:
    """Weights of the terms.

    Attributes:
        k: K of the Top-K term.
        steps: a factor per align step; None: 1 for each.
        acceptance_eta: None: the acceptance term is -log alpha; a number: the adaptive mixture with that decay.
    """

    feature: float = 1.0
    ce: float = 0.1
    topk: float = 1.0
    k: int = 10
    steps: tuple[float, ...] | None = None
    acceptance: float = 0.0
    acceptance_eta: float | None = None

    def of_step(self, step: int) -> float:
        return 1.0 if self.steps is None else self.steps[step]


class TeacherStatistics(NamedTuple):
    """What the whole vocabulary says of a feature; R rows.

    `normaliser` [R] float32: log-sum-exp of the target's logits. `argmax` [R] int64: its greedy token.
    """

    normaliser: Tensor
    argmax: Tensor


def distill_loss_reference(
    outputs: Sequence[Tensor], features: Tensor, head: DistillHead, weights: DistillWeights, num_rows: float
) -> Tensor:
    """The loss as written above, in the dtype it is given, with every logit in memory and autograd's gradient."""
    parts, _ = reference_parts(outputs, features, head, weights)
    factors = parts.new_tensor([weights.feature, weights.ce, weights.topk, weights.acceptance])
    of_steps = parts.new_tensor([weights.of_step(j) for j in range(len(outputs))])
    return of_steps @ (parts @ factors) / num_rows


def reference_parts(
    outputs: Sequence[Tensor], features: Tensor, head: DistillHead, weights: DistillWeights
) -> tuple[Tensor, Tensor]:
    """Sums of the four terms [J, 4] and ranks [J, R], as in `distill_loss.DistillOutput`."""
    p = torch.softmax(head.scale * features @ head.weight.T, -1)
    t = head.scale * features @ head.draft_weight.T
    r = torch.softmax(t, -1)
    ids = t.topk(min(weights.k, t.shape[-1])).indices
    sayable = p if head.positions is None else p[:, torch.argsort(head.positions)[-t.shape[-1] :]]
    greedy = (features @ head.weight.T).argmax(-1)
    greedy = greedy if head.positions is None else head.positions[greedy]
    parts, ranks = [], []
    for y in outputs:
        log_q = torch.log_softmax(head.scale * y @ head.draft_weight.T, -1)
        feature = F.smooth_l1_loss(y, features, reduction="none").mean(-1)
        ce = -(r * log_q).sum(-1)
        topk = -(sayable.gather(1, ids) * log_q.gather(1, ids)).sum(-1)
        accepted = torch.zeros_like(ce)
        if weights.acceptance:
            accepted = acceptance_term(sayable, r, log_q, weights.acceptance_eta)
        parts.append(torch.stack([feature.sum(), ce.sum(), topk.sum(), accepted.sum()]))
        ranks.append(ranks_of(log_q, greedy))
    return torch.stack(parts), torch.stack(ranks)


def ranks_of(log_q: Tensor, greedy: Tensor) -> Tensor:
    """Ranks [R] int64, as in `distill_loss.DistillOutput`, of the places `greedy` [R] in log q [R, Vd]."""
    above = (log_q > log_q.gather(1, greedy.clamp(min=0)[:, None])).sum(-1)
    ranks = torch.where(log_q.argmax(-1) == greedy, 0, above.clamp(min=1))
    return torch.where(greedy >= 0, ranks, log_q.shape[-1])


def acceptance_term(p: Tensor, r: Tensor, log_q: Tensor, eta: float | None) -> Tensor:
    """The acceptance term [R] from p, r and log q over the draft's vocabulary, each [R, Vd]."""
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    if eta is None:
        return -torch.log(alpha)
    divergence = torch.special.xlogy(r, r).sum(-1) - (r * log_q).sum(-1)
    mix = torch.exp(-eta * alpha.detach())
    return mix * divergence + (1 - mix) * (1 - alpha)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Of sums and softmax, where products are in `dtype`: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
