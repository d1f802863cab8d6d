"""The trainable chunked scan against the plain recurrence."""

import pytest
import torch

from draftwood.kernels.chunk_scan import chunk_scan


def recurrence(x, dt, A, B, C, D):
    heads, groups = x.shape[2], B.shape[2]
    B, C = (t.repeat_interleave(heads // groups, 2) for t in (B, C))
    state, out = torch.zeros(*x.shape[:1], heads, x.shape[3], B.shape[3], dtype=x.dtype), []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None, :]
        out.append((state * C[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1)


def inputs(tokens, heads=4, groups=2, width=3, state=5):
    draw = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)

    dt = torch.rand(2, tokens, heads, generator=draw, dtype=torch.float64).mul(2).requires_grad_()
    A = -torch.rand(heads, generator=draw, dtype=torch.float64).mul(3).exp()
    x, B, C = normal(2, tokens, heads, width), normal(2, tokens, groups, state), normal(2, tokens, groups, state)
    return x, dt, A.requires_grad_(), B, C, normal(heads)


@pytest.mark.parametrize("tokens", [1, 7, 8, 31, 45])
def test_chunked_scan_and_its_gradients_are_those_of_the_recurrence(tokens):
    given = inputs(tokens)
    y, expected = chunk_scan(*given, chunk=8), recurrence(*given)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)  # decays are kept in float32
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad((y * weights).sum(), given),
                    torch.autograd.grad((expected * weights).sum(), given), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_decays_that_would_overflow_above_the_diagonal_stay_finite():
    x, dt, _, B, C, D = inputs(16)
    y = chunk_scan(x, dt * 50, torch.full((4,), -1000.0, dtype=torch.float64), B, C, D, chunk=16)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all() and torch.isfinite(dt.grad).all()
