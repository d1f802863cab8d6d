"""The distillation loss of all align steps, without the logits (HASS: feature regression + soft CE + Top-K).

Of R supervised rows only `rows_per_chunk` have logits at a time, forward and backward: the loss is a sum over rows
whose gradient has a closed form, so both come out of one pass and nothing is kept but the gradients of the draft's
outputs. The teacher's half of a chunk is computed once and serves every align step.

Per row, with t = head(feature) and l = head(output) over the draft's vocabulary, q = softmax(l):

    feature  mean over D of SmoothL1(output, feature)
    ce       -sum_v r_v log q_v                r = softmax(t), over the draft's vocabulary
    topk     -sum_{v in top K} p_v log q_v     p = softmax over the target's vocabulary; the K best the draft can say

With a reduced draft vocabulary r is p restricted and renormalised, as EAGLE-3 trains, while p in the Top-K term keeps
the mass that it has for the target: rows whose likely tokens the draft cannot say count for little. Without, r = p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Weights of the three terms, K of the Top-K term, and a factor per align step (None: 1 for each)."""

    feature: float = 1.0
    ce: float = 0.1
    topk: float = 1.0
    k: int = 10
    steps: tuple[float, ...] | None = None

    def of_step(self, step: int) -> float:
        return 1.0 if self.steps is None else self.steps[step]


class TeacherStatistics(NamedTuple):
    """What the whole vocabulary says of a feature; R rows.

    `normaliser` [R] float32: log-sum-exp of the target's logits. `argmax` [R] int64: its greedy token.
    """

    normaliser: Tensor
    argmax: Tensor


class DistillOutput(NamedTuple):
    """What `distill_loss` returns, for J align steps and R rows.

    `loss` [] is differentiable. `parts` [J, 3]: sums over rows of the feature, ce and topk terms, unweighted.
    `ranks` [J, R] int64: how many draft logits are above that of the target's greedy token (one token wins a tie for
    the first place); Vd where the draft cannot say it.
    """

    loss: Tensor
    parts: Tensor
    ranks: Tensor


def teacher_statistics(features: Tensor, head: DistillHead, rows_per_chunk: int = 1024) -> TeacherStatistics:
    """Log-sum-exp and argmax of the target's logits for `features` [R, D], holding [rows_per_chunk, V] at a time."""
    with torch.autocast(features.device.type, enabled=False):
        chunks = [_statistics(_logits(f, head.weight, head.scale)) for f in features.split(rows_per_chunk)]
    return TeacherStatistics(torch.cat([c.normaliser for c in chunks]), torch.cat([c.argmax for c in chunks]))


def distill_loss(
    outputs: Sequence[Tensor],
    features: Tensor,
    head: DistillHead,
    weights: DistillWeights,
    num_rows: float,
    statistics: TeacherStatistics | None = None,
    rows_per_chunk: int = 1024,
) -> DistillOutput:
    """Sum over align steps and rows of the weighted terms, divided by `num_rows`.

    Args:
        outputs: the draft's outputs of align steps 1..J at the supervised rows, each [R, D]; R may be 0.
        features: [R, D] the target's features that the rows predict; no gradient.
        head: the target's output layer; no gradient.
        num_rows: number of supervised rows in the global batch.
        statistics: of `features`; None: computed here, at the cost of one product with the whole vocabulary.
        rows_per_chunk: rows whose logits are held at a time.

    Raises:
        ValueError: an output whose shape is not that of `features`, or fewer step weights than align steps.
    """
    for j, output in enumerate(outputs, 1):
        if output.shape != features.shape:
            raise ValueError(
                f"output of align step {j} is {list(output.shape)}, features of its rows {list(features.shape)}"
            )
    if weights.steps is not None and len(weights.steps) < len(outputs):
        raise ValueError(f"{len(weights.steps)} step weights for {len(outputs)} align steps")
    options = (features, head, weights, num_rows, statistics, rows_per_chunk)
    return DistillOutput(*_DistillLoss.apply(options, *outputs))


def distill_loss_reference(
    outputs: Sequence[Tensor], features: Tensor, head: DistillHead, weights: DistillWeights, num_rows: float
) -> Tensor:
    """The loss as written above, in the dtype it is given, with every logit in memory and autograd's gradient."""
    p = torch.softmax(head.scale * features @ head.weight.T, -1)
    t = head.scale * features @ head.draft_weight.T
    r = torch.softmax(t, -1)
    ids = t.topk(min(weights.k, t.shape[-1])).indices
    sayable = p if head.positions is None else p[:, torch.argsort(head.positions)[-t.shape[-1] :]]
    total = outputs[0].sum() * 0
    for j, y in enumerate(outputs):
        log_q = torch.log_softmax(head.scale * y @ head.draft_weight.T, -1)
        feature = F.smooth_l1_loss(y, features, reduction="none").mean(-1)
        ce = -(r * log_q).sum(-1)
        topk = -(sayable.gather(1, ids) * log_q.gather(1, ids)).sum(-1)
        row = weights.feature * feature + weights.ce * ce + weights.topk * topk
        total = total + weights.of_step(j) * row.sum()
    return total / num_rows


class _Teacher(NamedTuple):
    """One chunk of C rows, shared by the align steps.

    `ids`, `probs` [C, K]: the Top-K term's tokens (draft order) and their p. `argmax` [C]: place of the greedy token in
    the draft's vocabulary, -1 for none. `ce_pull` [C, D]: scale * (r @ draft_weight), which is also the target's half
    of the gradient; `pull` [C, D]: the same for the weighted mass of both terms, whose total is `mass` [C].
    """

    ids: Tensor
    probs: Tensor
    argmax: Tensor
    ce_pull: Tensor | None
    pull: Tensor
    mass: Tensor


class _DistillLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple, *outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, head, weights, num_rows, statistics, rows_per_chunk = options
        wide = _wide(head.weight.dtype)
        num_steps, rows = len(outputs), len(features)
        parts = torch.zeros(num_steps, 3, dtype=wide, device=features.device)
        ranks = torch.empty(num_steps, rows, dtype=torch.int64, device=features.device)
        grads = [
            torch.empty_like(y) if needed else None for y, needed in zip(outputs, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.autocast(features.device.type, enabled=False):
            for start in range(0, rows, rows_per_chunk):
                part = slice(start, start + rows_per_chunk)
                chunk = None if statistics is None else TeacherStatistics(*(s[part] for s in statistics))
                teacher = _teacher(features[part], head, weights, chunk)
                for j, (y, grad) in enumerate(zip(outputs, grads, strict=True)):
                    sums, ranks[j, part], slope = _step(
                        y[part], features[part], head, weights, teacher, grad is not None
                    )
                    parts[j] += sums
                    if grad is not None and slope is not None:
                        grad[part] = slope * (weights.of_step(j) / num_rows)
            factors = parts.new_tensor([weights.feature, weights.ce, weights.topk])
            steps = parts.new_tensor([weights.of_step(j) for j in range(num_steps)])
            loss = (steps @ (parts @ factors)) / num_rows
        ctx.grads = grads
        ctx.mark_non_differentiable(parts, ranks)
        return loss, parts, ranks

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if g is None else g * grad_loss.to(g.dtype) for g in ctx.grads)


def _teacher(
    features: Tensor, head: DistillHead, weights: DistillWeights, statistics: TeacherStatistics | None
) -> _Teacher:
    logits = _logits(features, head.draft_weight, head.scale)
    if statistics is None:
        whole = logits if head.positions is None else _logits(features, head.weight, head.scale)
        statistics = _statistics(whole)
    wide = _wide(logits.dtype)
    top, ids = logits.topk(min(weights.k, logits.shape[-1]))
    probs = torch.exp(top.to(wide) - statistics.normaliser.to(wide)[:, None])
    pull = weights.topk * head.scale * _mix(probs, ids, head.draft_weight)
    mass = weights.topk * probs.sum(-1)
    ce_pull = None
    if weights.ce:
        restricted = torch.softmax(logits, -1, dtype=wide)
        ce_pull = head.scale * (restricted.to(logits.dtype) @ head.draft_weight).to(wide)
        pull = pull + weights.ce * ce_pull
        mass = mass + weights.ce
    argmax = statistics.argmax if head.positions is None else head.positions[statistics.argmax]
    return _Teacher(ids, probs, argmax, ce_pull, pull, mass)


def _step(
    y: Tensor,
    features: Tensor,
    head: DistillHead,
    weights: DistillWeights,
    teacher: _Teacher,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums of the three terms [3], ranks [C] and the gradient [C, D] of one align step over one chunk."""
    logits = _logits(y, head.draft_weight, head.scale)
    wide = _wide(logits.dtype)
    q, normaliser, first = _softmax(logits)
    difference = y.to(wide) - features.to(wide)
    feature = F.smooth_l1_loss(difference, torch.zeros_like(difference), reduction="sum") / y.shape[-1]
    topk = (teacher.probs * (normaliser[:, None] - logits.gather(1, teacher.ids).to(wide))).sum()
    ce = torch.zeros_like(topk)
    if teacher.ce_pull is not None:
        ce = (normaliser - (teacher.ce_pull * y.to(wide)).sum(-1)).sum()
    sums = torch.stack([feature, ce, topk])
    ranks = _ranks(q, first, teacher.argmax)
    if not with_grad:
        return sums, ranks, None
    push = head.scale * (q.to(logits.dtype) @ head.draft_weight).to(wide)
    grad = teacher.mass[:, None] * push - teacher.pull
    grad += difference.clamp_(-1, 1) * (weights.feature / y.shape[-1])
    return sums, ranks, grad


def _ranks(q: Tensor, first: Tensor, argmax: Tensor) -> Tensor:
    above = torch.gt(q, q.gather(1, argmax.clamp(min=0)[:, None]), out=torch.empty_like(q)).sum(-1).long()
    ranks = torch.where(first == argmax, 0, above.clamp(min=1))
    return torch.where(argmax >= 0, ranks, q.shape[-1])


def _logits(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    logits = x.to(weight.dtype) @ weight.T
    return logits if scale == 1.0 else logits.mul_(scale)


def _statistics(logits: Tensor) -> TeacherStatistics:
    _, normaliser, first = _softmax(logits)
    return TeacherStatistics(normaliser, first)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [C, V], their log-sum-exp [C] and argmax [C]."""
    q = torch.softmax(logits, -1, dtype=_wide(logits.dtype))
    first = q.max(-1)
    # The log-sum-exp from the largest entry, which cannot underflow: one read of q instead of two more passes.
    largest = logits.gather(1, first.indices[:, None])[:, 0].to(q.dtype)
    return q, largest - torch.log(first.values), first.indices


def _mix(probs: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """sum_k probs[r, k] * weight[ids[r, k]], [C, D] from probs and ids [C, K] and weight [V, D]."""
    return (probs[:, None].to(weight.dtype) @ weight[ids]).squeeze(1).to(probs.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
