"""KL through one output layer: autograd's value and gradient, whatever the chunks."""

import pytest
import torch

from draftwood.train import head_divergence as module
from draftwood.train.head_divergence import head_divergence


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 7, 64])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_value_and_gradient_are_those_of_autograd(monkeypatch, rows_per_chunk, compiled):
    monkeypatch.setattr(module, "_ROWS", rows_per_chunk)
    found, wanted, weight = (torch.randn(n, 6, dtype=torch.float64) for n in (14, 14, 33))
    found.requires_grad_()
    (3 * head_divergence(found, wanted, weight, compiled)).backward()
    given, found.grad = found.grad, None

    p, q = torch.softmax(wanted @ weight.T, -1), torch.softmax(found @ weight.T, -1)
    expected = (p * (p.log() - q.log())).sum(-1).mean()
    (3 * expected).backward()
    torch.testing.assert_close(head_divergence(found, wanted, weight, compiled), expected)
    torch.testing.assert_close(given, found.grad)


def test_products_in_bfloat16_under_autocast_are_near():
    found, wanted, weight = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16), torch.randn(50, 16) / 4
    exact = head_divergence(found, wanted, weight)
    with torch.autocast("cpu", torch.bfloat16):
        lean = head_divergence(found, wanted, weight.bfloat16())
    assert lean.dtype == torch.float32
    assert lean.item() == pytest.approx(exact.item(), rel=0.03)
