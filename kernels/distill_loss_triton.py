"""Triton kernel of the distillation loss: a row of logits between its two products. Unproven on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.distill_terms import DistillWeights, TeacherStatistics, wide
from draftwood.kernels.triton_common import accumulator, block, launch

# Tokens that a program reads at a time.
MOST_TOKENS = 4096


@triton.jit
def distill_row_kernel(
    logits, target, greedy, mass, sayable, normaliser, first, ranks, alpha, mix,
    tokens, places, weight, eta, tiny,
    HAS_DRAFT: tl.constexpr, HAS_ACCEPTANCE: tl.constexpr, HAS_ETA: tl.constexpr, HAS_GRAD: tl.constexpr,
    ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row of `logits` [rows, V], replaced by its weights; grid (rows,). Row i has the target's row i % places.

    Two passes: an online softmax, then the weights; with the acceptance term one more between them.
    """
    row = tl.program_id(0).to(tl.int64)
    place = row % places
    logits += row * tokens
    target += place * tokens
    wanted = tl.load(greedy + place) if HAS_DRAFT else place * 0 - 1
    bar = tl.load(logits + tl.maximum(wanted, 0)).to(ACC)
    largest = tl.full([], float("-inf"), ACC)
    total = tl.full([], 0.0, ACC)
    best = tl.full([], 0, tl.int64)
    above = tl.full([], 0, tl.int64)
    for start in range(0, tokens, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = tl.load(logits + v, mask=v < tokens, other=float("-inf")).to(ACC)
        here = tl.max(x, axis=0)
        best = tl.where(here > largest, start + tl.argmax(x, axis=0), best)
        higher = tl.maximum(largest, here)
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(x - higher), axis=0)
        largest = higher
        above += tl.sum((x > bar).to(tl.int64), axis=0)
    log_total = largest + tl.log(total)
    tl.store(normaliser + row, log_total)
    tl.store(first + row, best)

    scale = tl.full([], 1.0, ACC)
    slope = tl.full([], 0.0, ACC)
    if HAS_DRAFT:
        rank = tl.where(best == wanted, 0, tl.maximum(above, 1))
        tl.store(ranks + row, tl.where(wanted >= 0, rank, tokens))
        scale = tl.load(mass + place).to(ACC)
    if HAS_ACCEPTANCE:
        share = tl.load(sayable + place).to(ACC)
        overlap = tl.full([], 0.0, ACC)
        short = tl.full([], 0.0, ACC)
        for start in range(0, tokens, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            x = tl.load(logits + v, mask=v < tokens, other=float("-inf")).to(ACC)
            p = tl.load(target + v, mask=v < tokens, other=0.0).to(ACC) * share
            q = tl.exp(x - log_total)
            overlap += tl.sum(tl.minimum(p, q), axis=0)
            short += tl.sum(tl.where(q < p, q, 0.0), axis=0)
        blend = tl.full([], 0.0, ACC)
        if HAS_ETA:
            blend = tl.exp(-eta * overlap)
            slope = weight * (1.0 - blend)
        else:
            slope = weight / tl.maximum(overlap, tiny)
        scale += weight * blend + slope * short
        tl.store(alpha + row, overlap)
        tl.store(mix + row, blend)
    if HAS_GRAD:
        for start in range(0, tokens, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            x = tl.load(logits + v, mask=v < tokens, other=float("-inf")).to(ACC)
            q = tl.exp(x - log_total)
            weighed = q * scale
            if HAS_ACCEPTANCE:
                p = tl.load(target + v, mask=v < tokens, other=0.0).to(ACC) * share
                weighed -= tl.where(q < p, q * slope, 0.0)
            tl.store(logits + v, weighed.to(logits.dtype.element_ty), mask=v < tokens)


def probabilities_(logits: Tensor) -> TeacherStatistics:
    """As in `distill_loss_torch`."""
    normaliser, first = _outputs(logits)
    _launch(logits, logits, first, normaliser, normaliser, normaliser, first, first, normaliser, normaliser, None, True)
    return TeacherStatistics(normaliser, first)


def weigh_(
    drafts: Tensor,
    target: Tensor,
    greedy: Tensor,
    mass: Tensor,
    sayable: Tensor,
    weights: DistillWeights,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As in `distill_loss_torch`."""
    normaliser, first = _outputs(drafts)
    ranks, alpha, mix = torch.empty_like(first), torch.ones_like(normaliser), torch.zeros_like(normaliser)
    per_place = (target, greedy.contiguous(), mass.contiguous(), sayable.contiguous())
    _launch(drafts, *per_place, normaliser, first, ranks, alpha, mix, weights, with_grad)
    return normaliser, ranks, alpha, mix


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[:-1]
    normaliser = torch.empty(rows, dtype=wide(logits.dtype), device=logits.device)
    return normaliser, torch.empty(rows, dtype=torch.int64, device=logits.device)


def _launch(
    logits: Tensor,
    target: Tensor,
    greedy: Tensor,
    mass: Tensor,
    sayable: Tensor,
    normaliser: Tensor,
    first: Tensor,
    ranks: Tensor,
    alpha: Tensor,
    mix: Tensor,
    weights: DistillWeights | None,
    with_grad: bool,
) -> None:
    """`weights` None: the rows are the target's own."""
    assert logits.is_contiguous() and target.is_contiguous()
    rows = normaliser.numel()
    if not rows:
        return
    weight = 0.0 if weights is None else weights.acceptance
    eta = None if weights is None else weights.acceptance_eta
    launch(
        distill_row_kernel,
        (rows,),
        logits,
        **{"logits": logits, "target": target, "greedy": greedy, "mass": mass, "sayable": sayable},
        **{"normaliser": normaliser, "first": first, "ranks": ranks, "alpha": alpha, "mix": mix},
        **{"tokens": logits.shape[-1], "places": target.shape[0], "weight": weight, "eta": eta or 0.0},
        **{"tiny": torch.finfo(torch.float32).tiny, "HAS_DRAFT": weights is not None},
        **{"HAS_ACCEPTANCE": bool(weight), "HAS_ETA": eta is not None, "HAS_GRAD": with_grad},
        **{"ACC": accumulator(normaliser.dtype), "BLOCK_V": block(logits.shape[-1], MOST_TOKENS), "num_warps": 8},
    )
