"""Attention over trees, against a softmax over each node's own keys in float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from draftwood.kernels import reference
from draftwood.kernels.cases import assert_close, attention_inputs, cast, device_of, parents_from_draws, random_tables
from draftwood.kernels.dispatch import use
from draftwood.kernels.tables import TreeTables
from draftwood.kernels.tree_attention import tree_attention

SMALL = {"heads": 2, "kv_heads": 1, "width": 6, "value_width": 5}
DTYPES = {"reference": torch.float64, "torch": torch.float64, "triton": torch.float32}
trees = st.lists(st.integers(0, 10**6), max_size=12).map(parents_from_draws)


def run(backend, inputs, tables, dtype):
    device = device_of(backend)
    there = TreeTables.from_parents(tables.parents.to(device))
    with use(backend):
        o = tree_attention(tables=there, **cast(inputs, dtype, device))
    assert o.dtype == dtype
    return o.double().cpu()


def assert_equals_softmax(backend, inputs, tables, dtype):
    o = run(backend, inputs, tables, dtype)
    arguments = cast(cast(inputs, dtype), torch.float64)
    arguments.setdefault("scale", inputs["q"].shape[-1] ** -0.5)
    assert_close(o, reference.tree_attention(tables=tables, **arguments), dtype)


@given(parents=trees, seed=st.integers(0, 99), length=st.integers(0, 40))
@example(parents=[-1], seed=0, length=0)
@example(parents=[-1, *range(9)], seed=0, length=1)
@settings.get_profile("kernels")
def test_every_node_sees_the_prefix_and_its_path(backend, parents, seed, length):
    generator = torch.Generator().manual_seed(seed)
    inputs = attention_inputs(generator, 1, len(parents), **SMALL, lengths=[length])
    assert_equals_softmax(backend, inputs, TreeTables.from_parents(torch.tensor([parents])), DTYPES[backend])


@pytest.mark.parametrize("rows, nodes", [(3, 1), (1, 31), (3, 70)])
def test_rows_have_prefixes_of_different_lengths(backend, rows, nodes):
    generator = torch.Generator().manual_seed(nodes)
    inputs = attention_inputs(generator, 3, nodes, **SMALL, lengths=[0, 150, 67])
    assert_equals_softmax(backend, inputs, random_tables(generator, rows, nodes, 4), DTYPES[backend])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs(fast_backend, dtype):
    generator = torch.Generator().manual_seed(1)
    inputs = attention_inputs(generator, 2, 13, heads=6, kv_heads=2, width=20, value_width=20, lengths=[33, 100])
    assert_equals_softmax(fast_backend, inputs, random_tables(generator, 2, 13), dtype)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_heads_may_share_keys_or_not(backend, kv_heads):
    generator = torch.Generator().manual_seed(2)
    inputs = attention_inputs(generator, 1, 7, **(SMALL | {"heads": 4, "kv_heads": kv_heads}), lengths=[9])
    assert_equals_softmax(backend, inputs, random_tables(generator, 1, 7), DTYPES[backend])


def test_large_scores_do_not_overflow(backend):
    generator = torch.Generator().manual_seed(3)
    inputs = attention_inputs(generator, 1, 7, **SMALL, lengths=[9]) | {"scale": 3.0}
    inputs["q"] *= 30
    inputs["q"][:, :, 3] *= -1
    o = run(backend, inputs, random_tables(generator, 1, 7), DTYPES[backend])
    assert torch.isfinite(o).all()


def test_strided_inputs_are_read_in_place(backend):
    generator = torch.Generator().manual_seed(4)
    inputs = attention_inputs(generator, 2, 8, **SMALL, lengths=[9, 4])
    for name in ("q", "k_prefix", "v_prefix", "k_tree", "v_tree"):
        inputs[name] = inputs[name].repeat_interleave(2, dim=-1)[..., ::2]
        assert not inputs[name].is_contiguous()
    assert_equals_softmax(backend, inputs, random_tables(generator, 2, 8), DTYPES[backend])


def test_padding_nodes_are_never_read(backend):
    generator = torch.Generator().manual_seed(5)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 0, 0], [-1, 0, 0, 1, 3, 3]]))
    valid = torch.tensor([[True, True, True, False, False, False], [True] * 6])
    inputs = attention_inputs(generator, 2, 6, **SMALL, lengths=[9, 4])
    dtype = DTYPES[backend]
    expected = run(backend, inputs, tables, dtype)
    for name in ("q", "k_tree", "v_tree"):
        inputs[name][0, :, 3:] = float("nan")
    o = run(backend, inputs | {"valid": valid}, tables, dtype)
    assert (o[0, :, 3:] == 0).all()
    assert_close(o.transpose(1, 2)[valid], expected.transpose(1, 2)[valid], dtype)


def test_permuting_siblings_permutes_outputs(backend):
    generator = torch.Generator().manual_seed(6)
    inputs = attention_inputs(generator, 1, 7, **SMALL, lengths=[9])
    order = [0, 3, 4, 1, 2, 5, 6]
    dtype = DTYPES[backend]
    o = run(backend, inputs, TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 3, 1, 0]])), dtype)
    for name in ("q", "k_tree", "v_tree"):
        inputs[name] = inputs[name][:, :, order]
    permuted = run(backend, inputs, TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 3, 3, 0]])), dtype)
    assert_close(permuted, o[:, :, order], dtype)


def test_a_chain_equals_causal_attention(backend):
    generator = torch.Generator().manual_seed(7)
    inputs = cast(attention_inputs(generator, 2, 9, **SMALL, lengths=[12, 12]), torch.float32)
    o = run(backend, inputs, TreeTables.from_parents(torch.arange(-1, 8)[None]), torch.float32)
    keys = torch.cat([inputs["k_prefix"], inputs["k_tree"]], dim=2).repeat_interleave(2, dim=1)
    values = torch.cat([inputs["v_prefix"], inputs["v_tree"]], dim=2).repeat_interleave(2, dim=1)
    queries = torch.cat([torch.zeros(2, 2, 12, 6), inputs["q"]], dim=2)
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)[:, :, 12:]
    assert_close(o, expected.double(), torch.float32)


@pytest.mark.parametrize("name, shape", [("v_prefix", (1, 1, 9, 4)), ("k_tree", (1, 1, 5, 6)), ("lengths", (2,))])
def test_shapes_that_do_not_fit_are_named(name, shape):
    generator = torch.Generator().manual_seed(8)
    inputs = attention_inputs(generator, 1, 4, **SMALL, lengths=[9]) | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match="has shape"):
        tree_attention(tables=random_tables(generator, 1, 4), **inputs)
