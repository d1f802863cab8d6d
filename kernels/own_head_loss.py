"""The distillation loss of a draft whose head is its own and is trained (EAGLE-3, arXiv 2503.01840).

The terms are those of `distill_loss` without the feature term: there, both sides share one frozen head and the gradient
has a closed form; here the head takes part. Logits are held for one chunk of rows and one align step at a time: the
forward pass differentiates each as it comes, so that only gradients, as large as what they are of, wait for backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.distill_loss import (
    DistillHead,
    DistillOutput,
    DistillWeights,
    TeacherStatistics,
    chunk_rows,
    teacher_statistics,
)
from draftwood.kernels.distill_terms import acceptance_term, ranks_of, wide


def own_head_loss(
    outputs: Sequence[Tensor],
    weight: Tensor,
    features: Tensor,
    head: DistillHead,
    weights: DistillWeights,
    num_rows: float,
    statistics: TeacherStatistics | None = None,
    rows_per_chunk: int | None = None,
) -> DistillOutput:
    """As `distill_loss`, differentiable in `outputs` and in `weight`.

    Args:
        outputs: what the draft's head reads, of align steps 1..J at the supervised rows, each [R, D]; R may be 0.
        weight: [Vd, D], the draft's head. Products are in the dtype of the target's head.
        features: [R, D] the target's features that the rows predict; no gradient.
        head, num_rows, statistics: as in `distill_loss`.
        rows_per_chunk: rows of a tensor of logits, of which the target's and one align step's are held together. None:
            `chunk_rows` of the target's vocabulary.

    Raises:
        ValueError: a weight on the feature term.
    """
    if weights.feature:
        raise ValueError(
            f"the feature term has weight {weights.feature}, but a draft with a head of its own predicts no features; "
            "set align.feature_weight=0"
        )
    rows_per_chunk = rows_per_chunk or chunk_rows(len(head.weight))
    if statistics is None:
        statistics = teacher_statistics(features, head, rows_per_chunk)
    with_grad = torch.is_grad_enabled()  # which it never is inside `forward`
    options = (features, head, weights, num_rows, statistics, rows_per_chunk, with_grad)
    return DistillOutput(*_OwnHeadLoss.apply(options, weight, *outputs))


class _OwnHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple, weight: Tensor, *outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, head, weights, num_rows, statistics, rows_per_chunk, with_grad = options
        total = weight.new_zeros((), dtype=wide(head.weight.dtype))
        parts = torch.zeros(len(outputs), 4, dtype=total.dtype, device=features.device)
        ranks = torch.empty(len(outputs), len(features), dtype=torch.int64, device=features.device)
        # zero where there are no rows, as other processes wait for them; sums, so in the dtype of what they are of
        grads = [torch.zeros_like(x) for x in (weight, *outputs)] if with_grad else []
        cast = weight.detach().to(head.weight.dtype).requires_grad_(with_grad)
        with torch.autocast(features.device.type, enabled=False):
            for start in range(0, len(features), rows_per_chunk):
                part = slice(start, start + rows_per_chunk)
                chunk = TeacherStatistics(*(s[part] for s in statistics))
                teacher = _teacher(features[part], head, weights, chunk)
                for j, y in enumerate(outputs):
                    read = y[part].detach().requires_grad_(with_grad)
                    with torch.set_grad_enabled(with_grad):
                        ce, topk, accepted, ranks[j, part] = _step(read, cast, weights, *teacher)
                        terms = weights.ce * ce + weights.topk * topk + weights.acceptance * accepted
                        loss = weights.of_step(j) * terms
                        if with_grad:
                            of_head, grads[j + 1][part] = torch.autograd.grad(loss / num_rows, (cast, read))
                            grads[0].add_(of_head)
                    total += loss.detach()
                    parts[j] += torch.stack([torch.zeros_like(ce), ce, topk, accepted]).detach()
        ctx.grads = grads
        ctx.mark_non_differentiable(parts, ranks)
        return total / num_rows, parts, ranks

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad * grad_loss.to(grad.dtype) for grad in ctx.grads)


@torch.no_grad()
def _teacher(
    features: Tensor, head: DistillHead, weights: DistillWeights, statistics: TeacherStatistics
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens and p of the Top-K term [C, K], r [C, Vd], the mass of p that it shares [C], the greedy place [C]."""
    logits = (features.to(head.weight.dtype) @ head.draft_weight.T) * head.scale
    precise = wide(logits.dtype)
    top, ids = logits.topk(min(weights.k, logits.shape[-1]))
    probs = torch.exp(top.to(precise) - statistics.normaliser.to(precise)[:, None])
    argmax = statistics.argmax if head.positions is None else head.positions[statistics.argmax]
    sayable = torch.exp(torch.logsumexp(logits.to(precise), -1) - statistics.normaliser.to(precise))
    return ids, probs, torch.softmax(logits, -1, dtype=precise), sayable, argmax


def _step(
    y: Tensor,
    weight: Tensor,
    weights: DistillWeights,
    ids: Tensor,
    probs: Tensor,
    restricted: Tensor,
    sayable: Tensor,
    argmax: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of the ce, topk and acceptance terms, and ranks [C], of one align step over one chunk."""
    log_q = torch.log_softmax(y.to(weight.dtype) @ weight.T, -1, dtype=restricted.dtype)
    ce = -(restricted * log_q).sum()
    topk = -(probs * log_q.gather(1, ids)).sum()
    accepted = torch.zeros_like(ce)
    if weights.acceptance:
        p = restricted * sayable[:, None]
        accepted = acceptance_term(p, restricted, log_q, weights.acceptance_eta).sum()
    with torch.no_grad():
        ranks = ranks_of(log_q, argmax)
    return ce, topk, accepted, ranks
