"""The convolution over trees, against the path's own window in float64 and transformers' causal convolution."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn

from draftwood.kernels import reference
from draftwood.kernels.cases import assert_close, cast, conv_inputs, device_of, parents_from_draws, random_tables
from draftwood.kernels.dispatch import use
from draftwood.kernels.tables import TreeTables
from draftwood.kernels.tree_conv import tree_conv, tree_conv_commit

DTYPES = {"reference": torch.float64, "torch": torch.float64, "triton": torch.float32}
trees = st.lists(st.integers(0, 10**6), max_size=12).map(parents_from_draws)


def run(backend, inputs, tables, dtype):
    device = device_of(backend)
    there = TreeTables.from_parents(tables.parents.to(device))
    with use(backend):
        y = tree_conv(tables=there, **cast(inputs, dtype, device))
    assert y.dtype == dtype
    return y.double().cpu()


def assert_equals_paths(backend, inputs, tables, dtype):
    y = run(backend, inputs, tables, dtype)
    assert_close(y, reference.tree_conv(tables=tables, **cast(cast(inputs, dtype), torch.float64)), dtype)


@given(parents=trees, seed=st.integers(0, 99), taps=st.integers(2, 5), spare=st.integers(0, 2))
@example(parents=[-1], seed=0, taps=4, spare=1)
@example(parents=[-1, *range(9)], seed=0, taps=4, spare=0)
@settings.get_profile("kernels")
def test_every_node_sees_its_path_and_then_the_window(backend, parents, seed, taps, spare):
    generator = torch.Generator().manual_seed(seed)
    inputs = conv_inputs(generator, 1, len(parents), width=7, taps=taps, window=taps - 1 + spare)
    assert_equals_paths(backend, inputs, TreeTables.from_parents(torch.tensor([parents])), DTYPES[backend])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("nodes", [1, 31, 70])
def test_a_batch_has_one_tree_or_one_per_row(backend, rows, nodes):
    generator = torch.Generator().manual_seed(nodes)
    inputs = conv_inputs(generator, 3, nodes, width=5, taps=4, window=4)
    assert_equals_paths(backend, inputs, random_tables(generator, rows, nodes, 3), DTYPES[backend])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_are_accumulated_in_float32(fast_backend, dtype):
    generator = torch.Generator().manual_seed(1)
    inputs = conv_inputs(generator, 2, 12, width=33, taps=4, window=4)
    assert_equals_paths(fast_backend, inputs, random_tables(generator, 2, 12), dtype)


@pytest.mark.parametrize("absent", [{"bias": None}, {"activation": None}, {"bias": None, "activation": None}])
def test_optional_arguments_may_be_absent(backend, absent):
    generator = torch.Generator().manual_seed(2)
    inputs = conv_inputs(generator, 1, 6, width=5, taps=4, window=4) | absent
    assert_equals_paths(backend, inputs, random_tables(generator, 1, 6), DTYPES[backend])


def test_strided_inputs_are_read_in_place(backend):
    generator = torch.Generator().manual_seed(3)
    inputs = conv_inputs(generator, 2, 6, width=5, taps=4, window=4)
    for name in ("x", "window", "weight"):
        inputs[name] = inputs[name].transpose(-1, -2).repeat_interleave(2, dim=-1)[..., ::2].transpose(-1, -2)
        assert not inputs[name].is_contiguous()
    assert_equals_paths(backend, inputs, random_tables(generator, 2, 6), DTYPES[backend])


def test_padding_nodes_are_never_read(backend):
    generator = torch.Generator().manual_seed(4)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 0], [-1, 0, 0, 1, 3]]))
    valid = torch.tensor([[True, True, True, False, False], [True] * 5])
    inputs = conv_inputs(generator, 2, 5, width=5, taps=4, window=4)
    dtype = DTYPES[backend]
    expected = run(backend, inputs, tables, dtype)
    inputs["x"][0, :, 3:] = float("nan")
    y = run(backend, inputs | {"valid": valid}, tables, dtype)
    assert (y[0, :, 3:] == 0).all()
    assert torch.equal(y[0, :, :3], expected[0, :, :3])
    assert torch.equal(y[1], expected[1])


def test_a_chain_equals_the_convolution_of_transformers(backend):
    generator = torch.Generator().manual_seed(5)
    inputs = cast(conv_inputs(generator, 2, 9, width=6, taps=4, window=4), torch.float32)
    chain = TreeTables.from_parents(torch.arange(-1, 8)[None])
    y = run(backend, inputs, chain, torch.float32)
    whole = torch.cat([inputs["window"], inputs["x"]], dim=-1)
    expected = causal_conv1d_fn(whole, inputs["weight"], inputs["bias"], activation="silu")[:, :, -9:]
    assert_close(y, expected.double(), torch.float32)


@pytest.mark.parametrize("columns", [2, 3, 4, 6])
def test_the_window_advances_along_the_accepted_path(backend, columns):
    generator = torch.Generator().manual_seed(6)
    device = device_of(backend)
    parents = torch.tensor([[-1, 0, 0, 2, 3, 4]])
    x, window = torch.randn(6, 3, 6, generator=generator), torch.randn(6, 3, columns, generator=generator)
    before = window.clone()
    accepted = [-1, 0, 1, 2, 3, 5]
    paths = [[], [0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4, 5]]
    tables = TreeTables.from_parents(parents.to(device))
    with use(backend):
        new = tree_conv_commit(window.to(device), x.to(device), tables, torch.tensor(accepted, device=device)).cpu()
    assert torch.equal(window, before)
    for row, path in enumerate(paths):
        assert torch.equal(new[row], torch.cat([window[row], x[row][:, path]], dim=1)[:, -columns:])


def test_commit_finds_the_tree_of_each_row(backend):
    generator = torch.Generator().manual_seed(7)
    device = device_of(backend)
    tables = random_tables(generator, 4, 20, 3)
    x, window = torch.randn(4, 3, 20, generator=generator), torch.randn(4, 3, 4, generator=generator)
    nodes = torch.tensor([19, 7, -1, 0])
    there = TreeTables.from_parents(tables.parents.to(device))
    with use(backend):
        new = tree_conv_commit(window.to(device), x.to(device), there, nodes.to(device)).cpu()
    assert torch.equal(new, reference.tree_conv_commit(window, x, tables, nodes))


def test_index_tables_are_made_once_per_tree():
    generator = torch.Generator().manual_seed(8)
    tables = random_tables(generator, 1, 6)
    inputs = conv_inputs(generator, 1, 6, width=5, taps=4, window=4)
    tree_conv(tables=tables, **inputs)
    made = dict(tables._derived)
    tree_conv(tables=tables, **inputs)
    assert made and all(tables._derived[key] is value for key, value in made.items())


def test_a_window_that_is_too_short_is_refused():
    generator = torch.Generator().manual_seed(9)
    inputs = conv_inputs(generator, 1, 6, width=5, taps=4, window=2)
    with pytest.raises(ValueError, match="holds 2 committed columns, 4 taps need at least 3"):
        tree_conv(tables=random_tables(generator, 1, 6), **inputs)


def test_an_unknown_activation_is_refused():
    generator = torch.Generator().manual_seed(9)
    inputs = conv_inputs(generator, 1, 6, width=5, taps=4, window=4) | {"activation": "gelu"}
    with pytest.raises(ValueError, match="'gelu' is not one of"):
        tree_conv(tables=random_tables(generator, 1, 6), **inputs)


def test_shapes_that_do_not_fit_are_named():
    generator = torch.Generator().manual_seed(9)
    inputs = conv_inputs(generator, 1, 6, width=5, taps=4, window=4) | {"bias": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"bias has shape \[4\], expected \[D\] with D = 5"):
        tree_conv(tables=random_tables(generator, 1, 6), **inputs)
