"""The Mamba-2 scan over trees, against the recurrence in float64 and transformers' chunked scan."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from draftwood.kernels import reference
from draftwood.kernels.cases import (
    assert_close,
    cast,
    device_of,
    parents_from_draws,
    probed_nodes,
    random_tables,
    scan_inputs,
)
from draftwood.kernels.dispatch import use
from draftwood.kernels.tables import TreeTables
from draftwood.kernels.tree_scan import tree_scan

SMALL = {"heads": 2, "width": 5, "groups": 1, "states": 6}


def run(backend, inputs, tables, dtype):
    """Outputs and states after the probed nodes, in float64 on the CPU; the truth of the recurrence in float64."""
    device = device_of(backend)
    there = TreeTables.from_parents(tables.parents.to(device))
    with use(backend):
        arguments = cast(inputs, dtype, device)
        y, replay = tree_scan(tables=there, **arguments)
        batch = y.shape[0]
        states = [
            replay.advance(arguments["initial_state"], there, torch.full((batch,), node, device=device))
            for node in probed_nodes(backend, tables.num_nodes)
        ]
    assert y.dtype == dtype
    return y.double().cpu(), torch.stack([state.double().cpu() for state in states], dim=1)


def truth(inputs, tables):
    dt = reference.time_step(inputs["dt"], inputs["dt_bias"], inputs["dt_softplus"], inputs["dt_limit"])
    names = ("x", "A", "B", "C", "initial_state", "D", "z")
    x, A, B, C, state, D, z = (inputs[name] for name in names)
    y = reference.tree_scan(x, dt, A, B, C, tables, state, D, z)
    states = []
    for row in range(x.shape[0]):

        def step(node, at, row=row):
            return reference.scan_step(at, x[row, node], dt[row, node], A, B[row, node])

        states.append(torch.stack(reference.walk(tables, row, state[row], step)))
    return y, torch.stack(states)


def assert_equals_recurrence(backend, inputs, tables, dtype):
    rounded = cast(cast(inputs, dtype), torch.float64)
    y, states = run(backend, inputs, tables, dtype)
    true_y, true_states = truth(rounded, tables)
    assert_close(y, true_y, dtype)
    assert_close(states, true_states[:, probed_nodes(backend, tables.num_nodes)], dtype)


DTYPES = {"reference": torch.float64, "torch": torch.float64, "triton": torch.float32}
trees = st.lists(st.integers(0, 10**6), max_size=12).map(parents_from_draws)


@given(parents=trees, seed=st.integers(0, 99))
@example(parents=[-1], seed=0)
@example(parents=[-1, *range(9)], seed=0)
@example(parents=[-1] + [0] * 9, seed=0)
@settings.get_profile("kernels")
def test_every_node_equals_the_recurrence_along_its_path(backend, parents, seed):
    generator = torch.Generator().manual_seed(seed)
    tables = TreeTables.from_parents(torch.tensor([parents]))
    inputs = scan_inputs(generator, 1, len(parents), **SMALL)
    assert_equals_recurrence(backend, inputs, tables, DTYPES[backend])


@pytest.mark.parametrize("nodes, reach", [(1, None), (31, 3), (70, 5)])
def test_each_row_of_a_batch_has_its_own_tree(backend, nodes, reach):
    generator = torch.Generator().manual_seed(nodes)
    tables = random_tables(generator, 2, nodes, reach)
    inputs = scan_inputs(generator, 2, nodes, heads=2, width=3, groups=2, states=5)
    assert_equals_recurrence(backend, inputs, tables, DTYPES[backend])


def test_one_tree_serves_all_rows_of_a_batch(backend):
    generator = torch.Generator().manual_seed(0)
    tables = random_tables(generator, 1, 9)
    assert_equals_recurrence(backend, scan_inputs(generator, 3, 9, **SMALL), tables, DTYPES[backend])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_are_accumulated_in_float32(fast_backend, dtype):
    generator = torch.Generator().manual_seed(1)
    tables = random_tables(generator, 1, 40, 3)
    inputs = scan_inputs(generator, 1, 40, heads=4, width=40, groups=2, states=20)
    assert_equals_recurrence(fast_backend, inputs, tables, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reach", [1, None])
def test_extreme_decays_stay_exact(fast_backend, dtype, reach):
    if fast_backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernel is exact to float32: it takes differences of float64 sums")
    generator = torch.Generator().manual_seed(2)
    tables = random_tables(generator, 1, 33, reach)
    inputs = scan_inputs(generator, 1, 33, heads=4, width=3, groups=2, states=4, extreme=True)
    # Small time steps in front of the large ones and behind them: their decays are not small, and must not be lost.
    inputs["dt"][:, ::5] = 50.0
    inputs["A"][:2] = torch.tensor([-1000.0, -16.0])
    assert_equals_recurrence(fast_backend, inputs, tables, dtype)


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias"])
def test_optional_arguments_may_be_absent(backend, absent):
    generator = torch.Generator().manual_seed(3)
    tables = random_tables(generator, 1, 7)
    inputs = scan_inputs(generator, 1, 7, **SMALL) | {absent: None}
    assert_equals_recurrence(backend, inputs, tables, DTYPES[backend])


@pytest.mark.parametrize("softplus", [True, False])
def test_time_steps_are_limited(backend, softplus):
    generator = torch.Generator().manual_seed(4)
    tables = random_tables(generator, 1, 7)
    inputs = scan_inputs(generator, 1, 7, **SMALL) | {"dt_limit": (0.1, 0.9), "dt_softplus": softplus}
    inputs["dt"] *= 5
    assert_equals_recurrence(backend, inputs, tables, DTYPES[backend])


def test_skip_connection_may_differ_within_a_head(backend):
    generator = torch.Generator().manual_seed(5)
    tables = random_tables(generator, 1, 7)
    inputs = scan_inputs(generator, 1, 7, **SMALL)
    inputs["D"] = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    assert_equals_recurrence(backend, inputs, tables, DTYPES[backend])


def test_strided_inputs_are_read_in_place(backend):
    generator = torch.Generator().manual_seed(6)
    tables = random_tables(generator, 2, 8)
    inputs = scan_inputs(generator, 2, 8, **SMALL)
    for name in ("x", "dt", "B", "C", "z", "initial_state"):
        inputs[name] = inputs[name].repeat_interleave(2, dim=-1)[..., ::2]
        assert not inputs[name].is_contiguous()
    dtype = DTYPES[backend]
    y, states = run(backend, inputs, tables, dtype)
    plain = {name: value.contiguous() if torch.is_tensor(value) else value for name, value in inputs.items()}
    expected_y, expected_states = run(backend, plain, tables, dtype)
    assert_close(y, expected_y, dtype)
    assert_close(states, expected_states, dtype)


def test_padding_nodes_are_never_read(backend):
    generator = torch.Generator().manual_seed(7)
    parents = torch.tensor([[-1, 0, 1, 0, 0, 0], [-1, 0, 0, 1, 3, 3]])
    valid = torch.tensor([[True, True, True, False, False, False], [True] * 6])
    inputs = scan_inputs(generator, 2, 6, **SMALL)
    dtype = DTYPES[backend]
    expected_y, expected_states = run(backend, inputs, TreeTables.from_parents(parents), dtype)
    for name in ("x", "dt", "B", "C", "z"):
        inputs[name][0, 3:] = float("nan")
    inputs["valid"] = valid
    y, states = run(backend, inputs, TreeTables.from_parents(parents), dtype)
    assert (y[0, 3:] == 0).all()
    assert_close(y[valid], expected_y[valid], dtype)
    assert_close(states[1], expected_states[1], dtype)
    assert_close(states[0, 0], expected_states[0, 0], dtype)


def test_padding_nodes_have_no_time_step(backend):
    generator = torch.Generator().manual_seed(7)
    device = device_of(backend)
    inputs = cast(scan_inputs(generator, 1, 5, **SMALL), DTYPES[backend], device)
    valid = torch.tensor([[True, True, False, True, False]], device=device)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 0, 1, 0]], device=device))
    with use(backend):
        _, replay = tree_scan(tables=tables, **inputs, valid=valid)
    assert (replay.dt[~valid] == 0).all()
    assert (replay.dt[valid] > 0).all()


def test_a_junk_branch_changes_nothing(backend):
    generator = torch.Generator().manual_seed(8)
    parents = [-1, 0, 1, 0, 3, 1, 0]
    inputs = scan_inputs(generator, 1, 7, **SMALL)
    tables = TreeTables.from_parents(torch.tensor([parents]))
    dtype = DTYPES[backend]
    y, _ = run(backend, inputs, tables, dtype)
    for name in ("x", "B", "C"):
        inputs[name][0, 3:5] = 1e6
    inputs["dt"][0, 3:5] = 40.0
    junk, _ = run(backend, inputs, tables, dtype)
    kept = [0, 1, 2, 5, 6]
    assert torch.equal(junk[0, kept], y[0, kept])


def test_permuting_siblings_permutes_outputs(backend):
    generator = torch.Generator().manual_seed(9)
    inputs = scan_inputs(generator, 1, 7, **SMALL)
    # Node 1's subtree (2, 5) and node 3's (4) change places.
    order = [0, 3, 4, 1, 2, 5, 6]
    parents = [-1, 0, 1, 0, 3, 1, 0]
    moved = [-1, 0, 1, 0, 3, 3, 0]
    dtype = DTYPES[backend]
    y, _ = run(backend, inputs, TreeTables.from_parents(torch.tensor([parents])), dtype)
    for name in ("x", "dt", "B", "C", "z"):
        inputs[name] = inputs[name][:, order]
    permuted_y, _ = run(backend, inputs, TreeTables.from_parents(torch.tensor([moved])), dtype)
    assert_close(permuted_y, y[:, order], dtype)


def test_a_chain_equals_the_chunked_scan_of_transformers(backend):
    generator = torch.Generator().manual_seed(10)
    inputs = cast(scan_inputs(generator, 2, 9, heads=4, width=8, groups=2, states=10) | {"z": None}, torch.float32)
    chain = TreeTables.from_parents(torch.arange(-1, 8)[None])
    y, states = run(backend, inputs, chain, torch.float32)
    arguments = [inputs[name] for name in ("x", "dt", "A", "B", "C")]
    expected_y, expected_state = mamba2_chunk_scan(
        *arguments,
        chunk_size=8,
        D=inputs["D"],
        dt_bias=inputs["dt_bias"],
        initial_states=inputs["initial_state"],
        dt_softplus=True,
        return_final_states=True,
    )
    assert_close(y, expected_y.double(), torch.float32)
    assert_close(states[:, -1], expected_state.double(), torch.float32)


def test_rows_may_accept_different_numbers_of_nodes(backend):
    generator = torch.Generator().manual_seed(11)
    dtype = DTYPES[backend]
    device = device_of(backend)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 0, 2, 3, 4]], device=device))
    inputs = scan_inputs(generator, 5, 6, **SMALL)
    accepted = [-1, 0, 2, 3, 5]
    with use(backend):
        arguments = cast(inputs, dtype, device)
        _, replay = tree_scan(tables=tables, **arguments)
        before = arguments["initial_state"].clone()
        state = replay.advance(arguments["initial_state"], tables, torch.tensor(accepted, device=device))
    assert torch.equal(arguments["initial_state"], before)
    assert torch.equal(state[0], before[0])
    _, true_states = truth(cast(cast(inputs, dtype), torch.float64), TreeTables.from_parents(tables.parents.cpu()))
    for row, node in enumerate(accepted[1:], start=1):
        assert_close(state[row].double().cpu(), true_states[row, node], dtype)


def test_state_keeps_its_dtype():
    generator = torch.Generator().manual_seed(12)
    inputs = cast(scan_inputs(generator, 1, 4, **SMALL), torch.bfloat16)
    tables = random_tables(generator, 1, 4)
    y, replay = tree_scan(tables=tables, **inputs)
    assert y.dtype == torch.bfloat16
    assert replay.to(torch.float32) is replay
    assert replay.advance(inputs["initial_state"], tables, torch.tensor([2])).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("B", (1, 4, 3, 6), "C has shape"),
        ("C", (1, 5, 1, 6), "C has shape"),
        ("dt", (1, 4), "dt has shape"),
        ("initial_state", (1, 2, 6, 5), "initial_state has shape"),
        ("valid", (2, 4), "valid has shape"),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, shape, message):
    generator = torch.Generator().manual_seed(13)
    inputs = scan_inputs(generator, 1, 4, **SMALL) | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=message):
        tree_scan(tables=random_tables(generator, 1, 4), **inputs)


def test_groups_must_divide_the_heads():
    generator = torch.Generator().manual_seed(14)
    inputs = scan_inputs(generator, 1, 4, heads=4, width=5, groups=3, states=6)
    with pytest.raises(ValueError, match="G = 3 does not divide H = 4"):
        tree_scan(tables=random_tables(generator, 1, 4), **inputs)


def test_trees_must_be_one_or_one_per_row():
    generator = torch.Generator().manual_seed(15)
    with pytest.raises(ValueError, match="2 trees for a batch of 3 rows"):
        tree_scan(tables=random_tables(generator, 2, 4), **scan_inputs(generator, 3, 4, **SMALL))
