"""One chunk of the distillation loss: two matrix products for the target and all align steps together.

Between them every row of logits is replaced, in place, by the weights of the product that gives its gradient:
`probabilities_` for the target, `weigh_` for the draft, here in torch, in `distill_loss_triton` as kernels and in
`distill_loss_compiled` through `torch.compile`. On a CPU the torch form takes a few rows at a time, so that its passes
over the vocabulary read and write the cache.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.kernels.dispatch import implementation
from draftwood.kernels.distill_terms import DistillHead, DistillWeights, TeacherStatistics, wide

# Of each of the two buffers that a few rows of probabilities take.
_CACHED_BYTES = 1 << 20
_PUSHED_ROWS = 256


class ChunkOutput(NamedTuple):
    """Of J align steps and C rows: sums of the four terms [J, 4], ranks [J, C] and, where asked for, gradients
    [J, C, D] of the sum over rows of the weighted terms."""

    sums: Tensor
    ranks: Tensor
    grads: Tensor | None


class Held:
    """Memory of one chunk's logits, used for every chunk: fresh pages would take a CPU as long as the product does."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def logits(self, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        """`scale * x @ weight.T` [C, V] of x [C, D], in the weight's dtype; the next call overwrites it."""
        size = len(x) * len(weight)
        if self._memory is None or self._memory.numel() < size:
            self._memory = weight.new_empty(size)
        logits = self._memory[:size].view(len(x), len(weight))
        torch.mm(x.to(weight.dtype), weight.T, out=logits)
        return logits if scale == 1.0 else logits.mul_(scale)


def statistics(features: Tensor, head: DistillHead, held: Held, compiled: bool = False) -> TeacherStatistics:
    """Of `features` [C, D], all of whose logits are held."""
    return _row_operations(features, compiled).probabilities_(held.logits(features, head.weight, head.scale))


def chunk(
    outputs: Sequence[Tensor],
    features: Tensor,
    head: DistillHead,
    weights: DistillWeights,
    known: TeacherStatistics | None,
    with_grad: bool,
    held: Held,
    compiled: bool = False,
) -> ChunkOutput:
    """Of `outputs` J times [C, D] and `features` [C, D], all of whose logits over the draft's vocabulary are held."""
    rows = _row_operations(features, compiled)
    num_steps, count, dtype = len(outputs), len(features), head.draft_weight.dtype
    if known is None and head.positions is not None:
        known = statistics(features, head, held, compiled)
    stacked = torch.cat([x.to(dtype) for x in (features, *outputs)])
    logits = held.logits(stacked, head.draft_weight, head.scale).view(num_steps + 1, count, -1)
    target, drafts = logits[0], logits[1:]

    top, ids = target.topk(min(weights.k, target.shape[-1]))
    picked = drafts.gather(2, ids.expand(num_steps, -1, -1)).to(wide(dtype))
    own = rows.probabilities_(target)
    known = known or own
    top_probs = torch.exp(top.to(wide(dtype)) - known.normaliser.to(wide(dtype))[:, None])
    sayable = torch.exp(own.normaliser - known.normaliser.to(wide(dtype)))
    greedy = known.argmax if head.positions is None else head.positions[known.argmax]
    mass = weights.topk * top_probs.sum(-1) + weights.ce

    normaliser, ranks, alpha, mix = rows.weigh_(drafts, target, greedy, mass, sayable, weights, with_grad)

    y = torch.stack([x.to(wide(dtype)) for x in outputs])
    wanted = features.to(wide(dtype))
    difference = y - wanted
    feature = F.smooth_l1_loss(difference, torch.zeros_like(difference), reduction="none").sum(-1) / y.shape[-1]
    topk = (top_probs * (normaliser[..., None] - picked)).sum(-1)
    pushed = logits if with_grad else logits[:1]
    push = head.scale * _push(pushed.flatten(0, 1), head.draft_weight).to(wide(dtype)).view(len(pushed), count, -1)
    ce = normaliser - (push[0] * y).sum(-1)
    accepted = torch.zeros_like(ce)
    if weights.acceptance:
        alpha.clamp_(min=torch.finfo(alpha.dtype).tiny)
        accepted = -torch.log(alpha)
        if weights.acceptance_eta is not None:
            entropy = own.normaliser - (push[0] * wanted).sum(-1)
            accepted = mix * (ce - entropy) + (1 - mix) * (1 - alpha)
    sums = torch.stack([term.sum(-1) for term in (feature, ce, topk, accepted)], -1)
    if not with_grad:
        return ChunkOutput(sums, ranks, None)
    grads = push[1:]
    grads -= weights.topk * head.scale * _mix(top_probs, ids, head.draft_weight)
    grads -= (weights.ce + weights.acceptance * mix)[..., None] * push[0]
    grads += difference.clamp_(-1, 1) * (weights.feature / y.shape[-1])
    return ChunkOutput(sums, ranks, grads)


def _row_operations(near: Tensor, compiled: bool) -> Any:
    """The module with `probabilities_` and `weigh_`: their kernels, their compiled form, or this one."""
    if implementation(near) == "triton":
        from draftwood.kernels import distill_loss_triton

        return distill_loss_triton
    if compiled:
        from draftwood.kernels import distill_loss_compiled

        return distill_loss_compiled
    return sys.modules[__name__]


def probabilities_(logits: Tensor) -> TeacherStatistics:
    """Replaces `logits` [C, V] by their softmax and returns what they were."""
    normaliser = torch.empty(len(logits), dtype=wide(logits.dtype), device=logits.device)
    argmax = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows, buffer, _ in _blocks(logits):
        probabilities, normaliser[rows], argmax[rows] = _softmax(logits[rows], buffer)
        logits[rows] = probabilities
    return TeacherStatistics(normaliser, argmax)


def weigh_(
    drafts: Tensor,
    target: Tensor,
    greedy: Tensor,
    mass: Tensor,
    sayable: Tensor,
    weights: DistillWeights,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Replaces logits by what each draft row weighs in the gradient's product, the target's part of it left out.

    Args:
        drafts: [J, C, V] logits, overwritten; what is left without `with_grad` means nothing.
        target: [C, V] r. sayable: [C] the mass of p that it stands for.
        greedy: [C] int64, place of the target's greedy token, -1 for none.
        mass: [C], what q weighs in the ce and topk terms.

    Returns:
        log-sum-exp [J, C], ranks [J, C] int64, alpha [J, C] and lambda [J, C]; 1 and 0 without an acceptance term.
    """
    normaliser = torch.empty(drafts.shape[:2], dtype=wide(drafts.dtype), device=drafts.device)
    ranks = torch.empty(drafts.shape[:2], dtype=torch.int64, device=drafts.device)
    alpha, mix = torch.ones_like(normaliser), torch.zeros_like(normaliser)
    for j, draft in enumerate(drafts):
        for rows, buffer, spare in _blocks(draft):
            q, normaliser[j, rows], first = _softmax(draft[rows], buffer)
            ranks[j, rows] = _ranks(q, first, greedy[rows], spare)
            if weights.acceptance:
                # p only to the precision of the products, as it stands in the place of its logits
                p = spare.copy_(target[rows]).mul_(sayable[rows, None])
                alpha[j, rows], mix[j, rows], draft[rows] = _accept_(q, p, weights, mass[rows])
            elif with_grad:
                draft[rows] = q.mul_(mass[rows, None])
    return normaliser, ranks, alpha, mix


def _accept_(q: Tensor, p: Tensor, weights: DistillWeights, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """alpha [n], lambda [n] and the weights of the gradient's product, from q and p [n, V], which are overwritten.

    alpha grows with the logit of v by q_v (1[q_v < p_v] - sum_{u: q_u < p_u} q_u).
    """
    below = torch.where(q < p, q, 0)
    alpha = torch.minimum(q, p, out=p).sum(-1)
    if weights.acceptance_eta is None:
        mix = torch.zeros_like(alpha)
        slope = weights.acceptance / alpha.clamp(min=torch.finfo(alpha.dtype).tiny)
    else:
        mix = torch.exp(-weights.acceptance_eta * alpha)
        slope = weights.acceptance * (1 - mix)
    pull = q.mul_((mass + weights.acceptance * mix + slope * below.sum(-1))[:, None])
    return alpha, mix, pull.sub_(below.mul_(slope[:, None]))


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The rows of `logits` [C, V] a few at a time, with two buffers [n, V] that are the same memory each time."""
    dtype = wide(logits.dtype)
    count = max(1, len(logits))
    if logits.device.type == "cpu":
        count = min(count, max(1, _CACHED_BYTES // (logits.shape[-1] * dtype.itemsize)))
    buffers = torch.empty(2, count, logits.shape[-1], dtype=dtype, device=logits.device)
    for start in range(0, len(logits), count):
        rows = slice(start, min(start + count, len(logits)))
        yield rows, *buffers[:, : rows.stop - start]


def _softmax(logits: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [n, V] in `buffer`, log-sum-exp [n] and argmax [n] of `logits` [n, V]."""
    q = torch.softmax(buffer.copy_(logits), -1, out=buffer)
    first = q.max(-1)
    # The log-sum-exp from the largest entry, which cannot underflow: one read of q instead of two more passes.
    largest = logits.gather(1, first.indices[:, None])[:, 0].to(q.dtype)
    return q, largest - torch.log(first.values), first.indices


def _ranks(q: Tensor, first: Tensor, greedy: Tensor, spare: Tensor) -> Tensor:
    """As in `DistillOutput`, from q [n, V], its argmax [n] and the greedy token's place [n], -1 for none."""
    above = torch.gt(q, q.gather(1, greedy.clamp(min=0)[:, None]), out=spare).sum(-1).long()
    ranks = torch.where(first == greedy, 0, above.clamp(min=1))
    return torch.where(greedy >= 0, ranks, q.shape[-1])


def _push(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight` [N, D] of rows [N, V]; on a CPU a few hundred rows at a time, as more leave its cache."""
    if rows.device.type != "cpu":
        return rows @ weight
    return torch.cat([part @ weight for part in rows.split(_PUSHED_ROWS)])


def _mix(probs: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """sum_k probs[r, k] * weight[ids[r, k]], [C, D] from probs and ids [C, K] and weight [V, D]."""
    return (probs[:, None].to(weight.dtype) @ weight[ids]).squeeze(1).to(probs.dtype)
