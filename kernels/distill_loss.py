"""The distillation loss of all align steps, without the logits; `distill_terms` says what its terms are.

The loss is a sum over rows whose gradient has a closed form, so both come out of one pass and nothing is kept but the
gradients of the draft's outputs. Of all logits only a chunk exists at a time, forward and backward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwood.kernels import distill_loss_torch
from draftwood.kernels.dispatch import implementation
from draftwood.kernels.distill_terms import (
    DistillHead,
    DistillWeights,
    TeacherStatistics,
    distill_loss_reference,
    reference_parts,
    wide,
)

__all__ = [
    "DistillHead",
    "DistillOutput",
    "DistillWeights",
    "TeacherStatistics",
    "distill_loss",
    "distill_loss_reference",
    "teacher_statistics",
]


# Logits held at a time where the rows are not given: 512 rows of a vocabulary of 49,152.
CHUNK_ELEMENTS = 512 * 49152
# Fewer rows make products too thin, however large the vocabulary.
MIN_CHUNK_ROWS = 32


def chunk_rows(vocab_size: int) -> int:
    """Rows of logits held at a time, so that their memory does not grow with the vocabulary."""
    return max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // vocab_size)


class DistillOutput(NamedTuple):
    """What `distill_loss` returns, for J align steps and R rows.

    `loss` [] is differentiable. `parts` [J, 4]: sums over rows of the feature, ce, topk and acceptance terms,
    unweighted; the last is 0 where it has no weight.
    `ranks` [J, R] int64: how many draft logits are above that of the target's greedy token (one token wins a tie for
    the first place); Vd where the draft cannot say it.
    """

    loss: Tensor
    parts: Tensor
    ranks: Tensor


def teacher_statistics(
    features: Tensor, head: DistillHead, rows_per_chunk: int | None = None, compiled: bool = False
) -> TeacherStatistics:
    """Log-sum-exp and argmax of the target's logits for `features` [R, D], holding [rows_per_chunk, V] at a time
    (None: `chunk_rows`); `compiled` as in `distill_loss`."""
    rows_per_chunk = rows_per_chunk or chunk_rows(len(head.weight))
    with torch.autocast(features.device.type, enabled=False):
        held = distill_loss_torch.Held()
        chunks = [distill_loss_torch.statistics(f, head, held, compiled) for f in features.split(rows_per_chunk)]
    return TeacherStatistics(torch.cat([c.normaliser for c in chunks]), torch.cat([c.argmax for c in chunks]))


def distill_loss(
    outputs: Sequence[Tensor],
    features: Tensor,
    head: DistillHead,
    weights: DistillWeights,
    num_rows: float,
    statistics: TeacherStatistics | None = None,
    rows_per_chunk: int | None = None,
    compiled: bool = False,
) -> DistillOutput:
    """Sum over align steps and rows of the weighted terms, divided by `num_rows`.

    Args:
        outputs: the draft's outputs of align steps 1..J at the supervised rows, each [R, D]; R may be 0.
        features: [R, D] the target's features that the rows predict; no gradient.
        head: the target's output layer; no gradient.
        num_rows: number of supervised rows in the global batch.
        statistics: of `features`; None: computed here, at the cost of one product with the whole vocabulary.
        rows_per_chunk: rows of logits held at a time, those of the target and of every align step together; at least
            one of each. None: `chunk_rows` of the target's vocabulary.
        compiled: through `torch.compile` where torch does the passes over the logits: the same up to rounding.

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
    if implementation(features) == "reference":
        parts, ranks = reference_parts(outputs, features, head, weights)
        loss = distill_loss_reference(outputs, features, head, weights, num_rows)
        return DistillOutput(loss, parts.detach(), ranks)
    rows_per_chunk = rows_per_chunk or chunk_rows(len(head.weight))
    options = (features, head, weights, num_rows, statistics, rows_per_chunk, compiled)
    return DistillOutput(*_DistillLoss.apply(options, *outputs))


class _DistillLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple, *outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, head, weights, num_rows, statistics, rows_per_chunk, compiled = options
        device, steps = features.device, len(outputs)
        parts = torch.zeros(steps, 4, dtype=wide(head.weight.dtype), device=device)
        ranks = torch.empty(steps, len(features), dtype=torch.int64, device=device)
        grads = [
            torch.empty_like(y) if needed else None for y, needed in zip(outputs, ctx.needs_input_grad[1:], strict=True)
        ]
        per_chunk = max(1, rows_per_chunk // (steps + 1))
        held = distill_loss_torch.Held()
        with torch.autocast(device.type, enabled=False):
            for start in range(0, len(features), per_chunk):
                rows = slice(start, start + per_chunk)
                known = None if statistics is None else TeacherStatistics(*(s[rows] for s in statistics))
                found = distill_loss_torch.chunk(
                    [y[rows] for y in outputs],
                    features[rows],
                    head,
                    weights,
                    known,
                    with_grad=any(g is not None for g in grads),
                    held=held,
                    compiled=compiled,
                )
                parts += found.sums
                ranks[:, rows] = found.ranks
                for j, grad in enumerate(grads):
                    if grad is not None and found.grads is not None:
                        grad[rows] = found.grads[j] * (weights.of_step(j) / num_rows)
            factors = parts.new_tensor([weights.feature, weights.ce, weights.topk, weights.acceptance])
            of_steps = parts.new_tensor([weights.of_step(j) for j in range(steps)])
            loss = (of_steps @ (parts @ factors)) / num_rows
        ctx.grads = grads
        ctx.mark_non_differentiable(parts, ranks)
        return loss, parts, ranks

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if g is None else g * grad_loss.to(g.dtype) for g in ctx.grads)
