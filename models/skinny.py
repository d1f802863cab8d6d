"""Linear layers on a CPU, for inputs of a few rows.

A tree forward multiplies each weight with 5 to 64 rows. There `x @ W.T`, what torch's linear layer runs, takes up to
three times as long on a CPU as the same product the other way round, `(W @ x.T).T`. Only code within `few_rows` turns
it round: the model's own forwards stay what they were, to the last bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn
from torch.nn import functional as F

_FEWEST, _MOST = 3, 64
_is_enabled: ContextVar[bool] = ContextVar("draftwood_few_rows", default=False)


@contextmanager
def few_rows() -> Iterator[None]:
    """Within this context skinny layers may turn their product round."""
    token = _is_enabled.set(True)
    try:
        yield
    finally:
        _is_enabled.reset(token)


class SkinnyLinear(nn.Linear):
    """A linear layer that, within `few_rows`, multiplies a few rows the fast way."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None and _is_enabled.get():
            return skinny_linear(x, self.weight)
        return super().forward(x)


def skinny_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(x, weight)`, [..., out] of x [..., in], turned round for a few rows on a CPU."""
    rows = x.numel() // x.shape[-1]
    if _FEWEST <= rows <= _MOST and x.device.type == "cpu":
        return (weight @ x.reshape(rows, -1).T).T.reshape(*x.shape[:-1], -1)
    return F.linear(x, weight)


def use_skinny_linears(model: nn.Module) -> None:
    """Makes the model's plain linear layers skinny ones; weights and names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = SkinnyLinear
