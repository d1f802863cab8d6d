"""The distillation loss of a draft whose head is its own and is trained (EAGLE-3, arXiv 2503.01840).

The terms are those of `distill_loss` without the feature term: there, both sides share one frozen head and the gradient
has a closed form; here the head takes part. Logits are held for one chunk of rows at a time, and made again in the
backward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
        head, num_rows, statistics, rows_per_chunk: as in `distill_loss`.

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
    total = weight.new_zeros((), dtype=wide(head.weight.dtype))
    parts = torch.zeros(len(outputs), 4, dtype=total.dtype, device=features.device)
    ranks = torch.empty(len(outputs), len(features), dtype=torch.int64, device=features.device)
    # so that no rows at all still have a gradient, of zero, for processes that wait for one of every parameter
    total = total + (weight.sum() + sum(y.sum() for y in outputs)) * 0
    with torch.autocast(features.device.type, enabled=False):
        for start in range(0, len(features), rows_per_chunk):
            part = slice(start, start + rows_per_chunk)
            chunk = TeacherStatistics(*(s[part] for s in statistics))
            ids, probs, restricted, sayable, argmax = _teacher(features[part], head, weights, chunk)
            for j, y in enumerate(outputs):
                teacher = (ids, probs, restricted, sayable, argmax)
                ce, topk, accepted, rank = checkpoint(
                    _step, y[part], weight.to(head.weight.dtype), weights, *teacher, use_reentrant=False
                )
                terms = weights.ce * ce + weights.topk * topk + weights.acceptance * accepted
                total = total + weights.of_step(j) * terms
                parts[j] += torch.stack([torch.zeros_like(ce), ce, topk, accepted]).detach()
                ranks[j, part] = rank
    return DistillOutput(total / num_rows, parts, ranks)


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
