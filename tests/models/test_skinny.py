"""Linear layers for a few rows give torch's results, and torch's own bits outside a tree forward."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from draftwood.models.skinny import SkinnyLinear, few_rows, skinny_linear, use_skinny_linears


@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 2, 24), (1, 3, 24), (2, 13, 24), (64, 24), (5, 13, 24), (3, 0, 24)])
def test_the_product_is_that_of_torch(shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=torch.float64), torch.randn(17, 24, dtype=torch.float64)
    torch.testing.assert_close(skinny_linear(x, weight), F.linear(x, weight), rtol=1e-12, atol=1e-12)
    assert skinny_linear(x, weight).shape == (*shape[:-1], 17)


def test_a_model_is_changed_within_few_rows_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.GELU(), nn.Linear(12, 5))
    names, x = list(model.state_dict()), torch.randn(7, 8)
    want = model(x)
    use_skinny_linears(model)
    assert all(type(model[i]) is SkinnyLinear for i in (0, 2)) and list(model.state_dict()) == names
    assert torch.equal(model(x), want)
    with few_rows():
        torch.testing.assert_close(model(x), want)
    assert torch.equal(model(x), want)
