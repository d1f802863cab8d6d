"""KL between the next-token distributions of two models with one output layer, without holding their logits."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.distill_terms import wide

# Two [rows, V] pieces of logits at a time; more rows leave a CPU's cache, fewer make thin products.
_ROWS = 256
Rowwise = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def head_divergence(found: Tensor, wanted: Tensor, weight: Tensor, compiled: bool = False) -> Tensor:
    """Mean over rows of KL(p, q) in nats, p = softmax(wanted @ weight.T), q = softmax(found @ weight.T).

    The gradient, (q - p) @ weight / R, has a closed form: it is computed with the loss, chunk by chunk.

    Args:
        found: [R, D] last hidden states; the gradient is theirs alone.
        wanted: [R, D]. weight: [V, D], in whose dtype the products are; softmax and sums are float32 or wider.
        compiled: with the passes over the vocabulary fused by `torch.compile`.
    """
    return _HeadDivergence.apply(found, wanted, weight, _fused() if compiled else _divergence)


class _HeadDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Tensor, wanted: Tensor, weight: Tensor, rowwise: Rowwise) -> Tensor:
        grad = torch.empty_like(found)
        total = torch.zeros((), dtype=wide(weight.dtype), device=found.device)
        with torch.autocast(found.device.type, enabled=False):
            for start in range(0, len(found), _ROWS):
                rows = slice(start, start + _ROWS)
                p, q = (x[rows].to(weight.dtype) @ weight.T for x in (wanted, found))
                divergence, push = rowwise(p, q)
                total += divergence.sum()
                grad[rows] = push @ weight
        ctx.grad = grad.div_(len(found))
        return total / len(found)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.grad * grad_loss.to(ctx.grad.dtype), None, None, None


def _divergence(wanted: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """KL [n] and q - p [n, V], in the logits' dtype, from logits [n, V]."""
    p, q = (x.to(wide(x.dtype)).log_softmax(-1) for x in (wanted, found))
    return (p.exp() * (p - q)).sum(-1), (q.exp() - p.exp()).to(wanted.dtype)


@cache
def _fused() -> Rowwise:
    return torch.compile(_divergence)
