"""Random trees and inputs for every operator, shared by the tests and the GPU check; all in float64."""

from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.tables import TreeTables

Inputs = dict[str, Any]

# Of the largest value: accumulation is float32 for bfloat16 inputs, only the output is rounded.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Both in float64 on the CPU; `dtype` is what `actual` was computed in.

    Raises:
        AssertionError: a value is not finite, or further from `expected` than `TOLERANCE` of the largest.
    """
    assert torch.isfinite(actual).all(), "not finite"
    tolerance = TOLERANCE[dtype]
    largest = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * largest)


def cast(inputs: Inputs, dtype: torch.dtype, device: torch.device | str = "cpu") -> Inputs:
    """`inputs` with their float64 tensors in `dtype`, everything on `device`."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    return {name: convert(value) for name, value in inputs.items()}


def device_of(backend: str) -> str:
    """Where the implementation `backend` is tested."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def probed_nodes(backend: str, nodes: int) -> list[int]:
    """The nodes whose states are compared: all of them, a few in the slow interpreter."""
    return list(range(nodes)) if backend != "triton" else sorted({0, nodes // 2, nodes - 1})


def parents_from_draws(draws: list[int]) -> list[int]:
    """A tree from any list of non-negative integers, one for each node after the root."""
    return [-1, *(draw % (node + 1) for node, draw in enumerate(draws))]


def random_parents(generator: torch.Generator, batch: int, nodes: int, reach: int | None = None) -> Tensor:
    """[batch, nodes] random trees; a parent is at most `reach` nodes back (1: chains)."""
    parents = torch.full((batch, nodes), -1)
    for node in range(1, nodes):
        first = 0 if reach is None else max(0, node - reach)
        parents[:, node] = torch.randint(first, node, (batch,), generator=generator)
    return parents


def random_tables(generator: torch.Generator, batch: int, nodes: int, reach: int | None = None) -> TreeTables:
    return TreeTables.from_parents(random_parents(generator, batch, nodes, reach))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def _extreme(generator: torch.Generator, *shape: int) -> Tensor:
    """Time steps from 1e-6 to 50 in one tensor."""
    return 50.0 * 10.0 ** (-8 * _uniform(generator, *shape))


def scan_inputs(
    generator: torch.Generator,
    batch: int,
    nodes: int,
    *,
    heads: int,
    width: int,
    groups: int,
    states: int,
    extreme: bool = False,
) -> Inputs:
    """Arguments of `tree_scan` apart from the tables; processed time steps and strong decays where `extreme`."""
    inputs: Inputs = {
        "x": _normal(generator, batch, nodes, heads, width),
        "dt": _normal(generator, batch, nodes, heads),
        "A": -0.1 - 4 * _uniform(generator, heads),
        "B": _normal(generator, batch, nodes, groups, states) / states**0.5,
        "C": _normal(generator, batch, nodes, groups, states),
        "initial_state": _normal(generator, batch, heads, width, states),
        "D": _normal(generator, heads),
        "z": _normal(generator, batch, nodes, heads, width),
        "dt_bias": _normal(generator, heads),
        "dt_softplus": True,
        "dt_limit": (0.0, float("inf")),
    }
    if extreme:
        inputs["dt"] = _extreme(generator, batch, nodes, heads)
        inputs["A"] = -(1000 ** _uniform(generator, heads))
        inputs["dt_bias"] = None
        inputs["dt_softplus"] = False
    return inputs


def conv_inputs(generator: torch.Generator, batch: int, nodes: int, *, width: int, taps: int, window: int) -> Inputs:
    """Arguments of `tree_conv` apart from the tables."""
    return {
        "x": _normal(generator, batch, width, nodes),
        "window": _normal(generator, batch, width, window),
        "weight": _normal(generator, width, taps) / taps**0.5,
        "bias": _normal(generator, width),
        "activation": "silu",
    }


def delta_inputs(
    generator: torch.Generator,
    batch: int,
    nodes: int,
    *,
    heads: int,
    key_heads: int,
    key_width: int,
    width: int,
    per_channel: bool = False,
    extreme: bool = False,
) -> Inputs:
    """Arguments of `tree_delta` apart from the tables; beta goes up to 2."""
    decay = (batch, nodes, heads, key_width) if per_channel else (batch, nodes, heads)
    return {
        "q": _normal(generator, batch, nodes, key_heads, key_width),
        "k": _normal(generator, batch, nodes, key_heads, key_width),
        "v": _normal(generator, batch, nodes, heads, width),
        "g": -_extreme(generator, *decay) if extreme else -_uniform(generator, *decay),
        "beta": 2 * _uniform(generator, batch, nodes, heads),
        "initial_state": _normal(generator, batch, heads, key_width, width),
        "use_qk_l2norm": True,
    }


def selective_inputs(
    generator: torch.Generator, batch: int, nodes: int, *, width: int, states: int, extreme: bool = False
) -> Inputs:
    """Arguments of `tree_selective` apart from the tables; processed time steps and strong decays where `extreme`."""
    return {
        "x": _normal(generator, batch, width, nodes),
        "dt": _extreme(generator, batch, width, nodes) if extreme else _normal(generator, batch, width, nodes),
        "A": -(1000 ** _uniform(generator, width, states)) if extreme else -4 * _uniform(generator, width, states),
        "B": _normal(generator, batch, states, nodes) / states**0.5,
        "C": _normal(generator, batch, states, nodes),
        "initial_state": _normal(generator, batch, width, states),
        "D": _normal(generator, width),
        "z": _normal(generator, batch, width, nodes),
        "dt_bias": None if extreme else _normal(generator, width),
        "dt_softplus": not extreme,
    }


def attention_inputs(
    generator: torch.Generator,
    batch: int,
    nodes: int,
    *,
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int,
    lengths: list[int],
) -> Inputs:
    """Arguments of `tree_attention` apart from the tables; NaN in the prefix past each row's length."""
    longest = max(lengths)
    inputs: Inputs = {
        "q": _normal(generator, batch, heads, nodes, width),
        "k_prefix": _normal(generator, batch, kv_heads, longest, width),
        "v_prefix": _normal(generator, batch, kv_heads, longest, value_width),
        "k_tree": _normal(generator, batch, kv_heads, nodes, width),
        "v_tree": _normal(generator, batch, kv_heads, nodes, value_width),
        "lengths": torch.tensor(lengths),
    }
    for row, length in enumerate(lengths):
        inputs["k_prefix"][row, :, length:] = float("nan")
        inputs["v_prefix"][row, :, length:] = float("nan")
    return inputs
