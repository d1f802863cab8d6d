"""The Mamba-1 scan over trees, against the recurrence in float64 and transformers' sequential scan."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from draftwood.kernels import reference
from draftwood.kernels.cases import (
    assert_close,
    cast,
    device_of,
    parents_from_draws,
    probed_nodes,
    random_tables,
    selective_inputs,
)
from draftwood.kernels.decay import NO_LIMIT
from draftwood.kernels.dispatch import use
from draftwood.kernels.tables import TreeTables
from draftwood.kernels.tree_selective import tree_selective

SMALL = {"width": 7, "states": 5}
DTYPES = {"reference": torch.float64, "torch": torch.float64, "triton": torch.float32}
trees = st.lists(st.integers(0, 10**6), max_size=12).map(parents_from_draws)


def run(backend, inputs, tables, dtype):
    """Outputs and states after the probed nodes, in float64 on the CPU."""
    device = device_of(backend)
    there = TreeTables.from_parents(tables.parents.to(device))
    with use(backend):
        arguments = cast(inputs, dtype, device)
        y, replay = tree_selective(tables=there, **arguments)
        states = [
            replay.advance(arguments["initial_state"], there, torch.full((y.shape[0],), node, device=device))
            for node in probed_nodes(backend, tables.num_nodes)
        ]
    assert y.dtype == dtype
    return y.double().cpu(), torch.stack([state.double().cpu() for state in states], dim=1)


def truth(inputs, tables):
    bias = None if inputs["dt_bias"] is None else inputs["dt_bias"][:, None]
    dt = reference.time_step(inputs["dt"], bias, inputs["dt_softplus"], NO_LIMIT)
    x, A, B, C, state, D, z = (inputs[name] for name in ("x", "A", "B", "C", "initial_state", "D", "z"))
    y = reference.tree_selective(x, dt, A, B, C, tables, state, D, z)
    states = []
    for row in range(x.shape[0]):

        def step(node, at, row=row):
            return reference.selective_step(at, x[row, :, node], dt[row, :, node], A, B[row, :, node])

        states.append(torch.stack(reference.walk(tables, row, state[row], step)))
    return y, torch.stack(states)


def assert_equals_recurrence(backend, inputs, tables, dtype):
    y, states = run(backend, inputs, tables, dtype)
    true_y, true_states = truth(cast(cast(inputs, dtype), torch.float64), tables)
    assert_close(y, true_y, dtype)
    assert_close(states, true_states[:, probed_nodes(backend, tables.num_nodes)], dtype)


@given(parents=trees, seed=st.integers(0, 99))
@example(parents=[-1], seed=0)
@example(parents=[-1, *range(9)], seed=0)
@settings.get_profile("kernels")
def test_every_node_equals_the_recurrence_along_its_path(backend, parents, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = selective_inputs(generator, 1, len(parents), **SMALL)
    assert_equals_recurrence(backend, inputs, TreeTables.from_parents(torch.tensor([parents])), DTYPES[backend])


@pytest.mark.parametrize("rows, nodes, reach", [(2, 1, 3), (1, 13, 5), (2, 17, None)])
def test_a_batch_has_one_tree_or_one_per_row(backend, rows, nodes, reach):
    generator = torch.Generator().manual_seed(nodes)
    tables = random_tables(generator, rows, nodes, reach)
    assert_equals_recurrence(backend, selective_inputs(generator, 2, nodes, **SMALL), tables, DTYPES[backend])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_are_accumulated_in_float32(fast_backend, dtype):
    generator = torch.Generator().manual_seed(1)
    inputs = selective_inputs(generator, 1, 7, width=33, states=16)
    assert_equals_recurrence(fast_backend, inputs, random_tables(generator, 1, 7, 3), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_decays_stay_exact(fast_backend, dtype):
    if fast_backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernel is exact to float32: it takes differences of float64 sums")
    generator = torch.Generator().manual_seed(2)
    inputs = selective_inputs(generator, 1, 17, **SMALL, extreme=True)
    inputs["dt"][:, :, ::5] = 50.0
    inputs["A"][0] = -1000.0
    assert_equals_recurrence(fast_backend, inputs, random_tables(generator, 1, 17, 1), dtype)


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias"])
def test_optional_arguments_may_be_absent(backend, absent):
    generator = torch.Generator().manual_seed(3)
    inputs = selective_inputs(generator, 1, 7, **SMALL) | {absent: None}
    assert_equals_recurrence(backend, inputs, random_tables(generator, 1, 7), DTYPES[backend])


def test_strided_inputs_are_read_in_place(backend):
    generator = torch.Generator().manual_seed(4)
    inputs = selective_inputs(generator, 2, 8, **SMALL)
    for name in ("x", "dt", "B", "C", "z", "initial_state"):
        inputs[name] = inputs[name].transpose(1, 2).repeat_interleave(2, dim=-1)[..., ::2].transpose(1, 2)
        assert not inputs[name].is_contiguous()
    assert_equals_recurrence(backend, inputs, random_tables(generator, 2, 8), DTYPES[backend])


def test_padding_nodes_are_never_read(backend):
    generator = torch.Generator().manual_seed(5)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 0, 0], [-1, 0, 0, 1, 3, 3]]))
    valid = torch.tensor([[True, True, True, False, False, False], [True] * 6])
    inputs = selective_inputs(generator, 2, 6, **SMALL)
    dtype = DTYPES[backend]
    expected_y, expected_states = run(backend, inputs, tables, dtype)
    for name in ("x", "dt", "B", "C", "z"):
        inputs[name][0, :, 3:] = float("nan")
    y, states = run(backend, inputs | {"valid": valid}, tables, dtype)
    assert (y[0, :, 3:] == 0).all()
    assert_close(y.transpose(1, 2)[valid], expected_y.transpose(1, 2)[valid], dtype)
    assert_close(states[1], expected_states[1], dtype)
    assert_close(states[0, 0], expected_states[0, 0], dtype)


def test_a_junk_branch_changes_nothing(backend):
    generator = torch.Generator().manual_seed(6)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 3, 1, 0]]))
    inputs = selective_inputs(generator, 1, 7, **SMALL)
    dtype = DTYPES[backend]
    y, _ = run(backend, inputs, tables, dtype)
    for name in ("x", "B", "C"):
        inputs[name][0, :, 3:5] = 1e6
    junk, _ = run(backend, inputs, tables, dtype)
    kept = [0, 1, 2, 5, 6]
    assert torch.equal(junk[0, :, kept], y[0, :, kept])


def test_permuting_siblings_permutes_outputs(backend):
    generator = torch.Generator().manual_seed(7)
    inputs = selective_inputs(generator, 1, 7, **SMALL)
    order = [0, 3, 4, 1, 2, 5, 6]
    dtype = DTYPES[backend]
    y, _ = run(backend, inputs, TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 3, 1, 0]])), dtype)
    for name in ("x", "dt", "B", "C", "z"):
        inputs[name] = inputs[name][:, :, order]
    moved = TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 3, 3, 0]]))
    permuted_y, _ = run(backend, inputs, moved, dtype)
    assert_close(permuted_y, y[:, :, order], dtype)


def test_a_chain_equals_the_scan_of_transformers(backend):
    generator = torch.Generator().manual_seed(8)
    inputs = cast(selective_inputs(generator, 2, 9, width=6, states=8), torch.float32)
    # transformers' scan starts from nothing.
    inputs["initial_state"].zero_()
    y, states = run(backend, inputs, TreeTables.from_parents(torch.arange(-1, 8)[None]), torch.float32)
    expected_y, expected_state = mamba_selective_scan(
        inputs["x"],
        inputs["dt"],
        inputs["A"],
        inputs["B"],
        inputs["C"],
        D=inputs["D"],
        z=inputs["z"],
        delta_bias=inputs["dt_bias"],
        delta_softplus=True,
        return_last_state=True,
    )
    assert_close(y, expected_y.double(), torch.float32)
    assert_close(states[:, -1], expected_state.double(), torch.float32)


def test_rows_may_accept_different_numbers_of_nodes(backend):
    generator = torch.Generator().manual_seed(9)
    dtype = DTYPES[backend]
    device = device_of(backend)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 0, 2, 3, 4]], device=device))
    inputs = selective_inputs(generator, 5, 6, **SMALL)
    accepted = [-1, 0, 2, 3, 5]
    with use(backend):
        arguments = cast(inputs, dtype, device)
        _, replay = tree_selective(tables=tables, **arguments)
        before = arguments["initial_state"].clone()
        state = replay.advance(arguments["initial_state"], tables, torch.tensor(accepted, device=device))
    assert torch.equal(arguments["initial_state"], before)
    assert torch.equal(state[0], before[0])
    _, true_states = truth(cast(cast(inputs, dtype), torch.float64), TreeTables.from_parents(tables.parents.cpu()))
    for row, node in enumerate(accepted[1:], start=1):
        assert_close(state[row].double().cpu(), true_states[row, node], dtype)


@pytest.mark.parametrize("name, shape", [("dt", (1, 7, 5)), ("C", (1, 4, 4)), ("initial_state", (1, 5, 7))])
def test_shapes_that_do_not_fit_are_named(name, shape):
    generator = torch.Generator().manual_seed(10)
    inputs = selective_inputs(generator, 1, 4, **SMALL) | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=f"{name} has shape"):
        tree_selective(tables=random_tables(generator, 1, 4), **inputs)
