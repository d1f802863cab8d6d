"""The gated delta rule over trees, against the recurrence in float64 and transformers' chunked and recurrent forms."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from draftwood.kernels import reference
from draftwood.kernels.cases import (
    assert_close,
    cast,
    delta_inputs,
    device_of,
    parents_from_draws,
    probed_nodes,
    random_tables,
)
from draftwood.kernels.dispatch import use
from draftwood.kernels.tables import TreeTables
from draftwood.kernels.tree_delta import tree_delta

SMALL = {"heads": 2, "key_heads": 1, "key_width": 6, "width": 5}
DTYPES = {"reference": torch.float64, "torch": torch.float64, "triton": torch.float32}
trees = st.lists(st.integers(0, 10**6), max_size=12).map(parents_from_draws)
per_channel = pytest.mark.parametrize("per_channel", [False, True])


def run(backend, inputs, tables, dtype):
    """Outputs and states after the probed nodes, in float64 on the CPU."""
    device = device_of(backend)
    there = TreeTables.from_parents(tables.parents.to(device))
    with use(backend):
        arguments = cast(inputs, dtype, device)
        o, replay = tree_delta(tables=there, **arguments)
        states = [
            replay.advance(arguments["initial_state"], there, torch.full((o.shape[0],), node, device=device))
            for node in probed_nodes(backend, tables.num_nodes)
        ]
    assert o.dtype == dtype
    return o.double().cpu(), torch.stack([state.double().cpu() for state in states], dim=1)


def truth(inputs, tables):
    q, k, v, g, beta, state = (inputs[name] for name in ("q", "k", "v", "g", "beta", "initial_state"))
    if inputs["use_qk_l2norm"]:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    o, u = reference.tree_delta(q, k, v, g, beta, tables, state, inputs.get("scale") or q.shape[-1] ** -0.5)
    states = []
    for row in range(v.shape[0]):

        def step(node, at, row=row):
            return reference.delta_step(at, k[row, node], u[row, node], g[row, node])

        states.append(torch.stack(reference.walk(tables, row, state[row], step)))
    return o, torch.stack(states)


def assert_equals_recurrence(backend, inputs, tables, dtype):
    o, states = run(backend, inputs, tables, dtype)
    true_o, true_states = truth(cast(cast(inputs, dtype), torch.float64), tables)
    assert_close(o, true_o, dtype)
    assert_close(states, true_states[:, probed_nodes(backend, tables.num_nodes)], dtype)


@given(parents=trees, seed=st.integers(0, 99), per_channel=st.booleans())
@example(parents=[-1], seed=0, per_channel=False)
@example(parents=[-1, *range(9)], seed=0, per_channel=True)
@settings.get_profile("kernels")
def test_every_node_equals_the_recurrence_along_its_path(backend, parents, seed, per_channel):
    generator = torch.Generator().manual_seed(seed)
    inputs = delta_inputs(generator, 1, len(parents), **SMALL, per_channel=per_channel)
    assert_equals_recurrence(backend, inputs, TreeTables.from_parents(torch.tensor([parents])), DTYPES[backend])


@per_channel
@pytest.mark.parametrize("rows, nodes, reach", [(2, 1, 3), (1, 31, 3), (2, 70, 5)])
def test_a_batch_has_one_tree_or_one_per_row(backend, rows, nodes, reach, per_channel):
    generator = torch.Generator().manual_seed(nodes)
    tables = random_tables(generator, rows, nodes, reach)
    inputs = delta_inputs(generator, 2, nodes, heads=2, key_heads=2, key_width=5, width=3, per_channel=per_channel)
    assert_equals_recurrence(backend, inputs, tables, DTYPES[backend])


@per_channel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_are_accumulated_in_float32(fast_backend, dtype, per_channel):
    generator = torch.Generator().manual_seed(1)
    inputs = delta_inputs(generator, 1, 20, heads=2, key_heads=1, key_width=20, width=17, per_channel=per_channel)
    assert_equals_recurrence(fast_backend, inputs, random_tables(generator, 1, 20, 3), dtype)


@per_channel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_decays_stay_exact(fast_backend, dtype, per_channel):
    if fast_backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernel is exact to float32: it takes differences of float64 sums")
    generator = torch.Generator().manual_seed(2)
    inputs = delta_inputs(generator, 1, 33, **SMALL, per_channel=per_channel, extreme=True)
    inputs["g"][:, ::5] = -5e4
    assert_equals_recurrence(fast_backend, inputs, random_tables(generator, 1, 33, 1), dtype)


@pytest.mark.parametrize("change", [{"use_qk_l2norm": False}, {"scale": 0.3}])
def test_normalisation_and_scale_are_arguments(backend, change):
    generator = torch.Generator().manual_seed(3)
    inputs = delta_inputs(generator, 1, 7, **SMALL) | change
    # Unnormalised keys of norm 1 at most: longer ones make the recurrence itself grow without bound.
    inputs["k"] /= 4
    assert_equals_recurrence(backend, inputs, random_tables(generator, 1, 7), DTYPES[backend])


@per_channel
def test_strided_inputs_are_read_in_place(backend, per_channel):
    generator = torch.Generator().manual_seed(4)
    inputs = delta_inputs(generator, 2, 8, **SMALL, per_channel=per_channel)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        inputs[name] = inputs[name].repeat_interleave(2, dim=-1)[..., ::2]
        assert not inputs[name].is_contiguous()
    assert_equals_recurrence(backend, inputs, random_tables(generator, 2, 8), DTYPES[backend])


@per_channel
def test_padding_nodes_are_never_read(backend, per_channel):
    generator = torch.Generator().manual_seed(5)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 0, 0], [-1, 0, 0, 1, 3, 3]]))
    valid = torch.tensor([[True, True, True, False, False, False], [True] * 6])
    inputs = delta_inputs(generator, 2, 6, **SMALL, per_channel=per_channel)
    dtype = DTYPES[backend]
    expected_o, expected_states = run(backend, inputs, tables, dtype)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][0, 3:] = float("nan")
    o, states = run(backend, inputs | {"valid": valid}, tables, dtype)
    assert (o[0, 3:] == 0).all()
    assert_close(o[valid], expected_o[valid], dtype)
    assert_close(states[1], expected_states[1], dtype)
    assert_close(states[0, 0], expected_states[0, 0], dtype)


@per_channel
def test_a_junk_branch_changes_nothing(backend, per_channel):
    generator = torch.Generator().manual_seed(6)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 3, 1, 0]]))
    inputs = delta_inputs(generator, 1, 7, **SMALL, per_channel=per_channel)
    dtype = DTYPES[backend]
    o, _ = run(backend, inputs, tables, dtype)
    inputs["v"][0, 3:5] = 1e6
    inputs["k"][0, 3:5] *= -1
    inputs["g"][0, 3:5] = -30.0
    junk, _ = run(backend, inputs, tables, dtype)
    kept = [0, 1, 2, 5, 6]
    assert_close(junk[0, kept], o[0, kept], dtype)


def test_permuting_siblings_permutes_outputs(backend):
    generator = torch.Generator().manual_seed(7)
    inputs = delta_inputs(generator, 1, 7, **SMALL)
    order = [0, 3, 4, 1, 2, 5, 6]
    dtype = DTYPES[backend]
    o, _ = run(backend, inputs, TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 3, 1, 0]])), dtype)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name][:, order]
    moved = TreeTables.from_parents(torch.tensor([[-1, 0, 1, 0, 3, 3, 0]]))
    permuted_o, _ = run(backend, inputs, moved, dtype)
    assert_close(permuted_o, o[:, order], dtype)


def test_a_chain_equals_the_chunked_rule_of_transformers(backend):
    generator = torch.Generator().manual_seed(8)
    inputs = cast(delta_inputs(generator, 2, 9, heads=2, key_heads=1, key_width=8, width=6), torch.float32)
    o, states = run(backend, inputs, TreeTables.from_parents(torch.arange(-1, 8)[None]), torch.float32)
    arguments = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    expected_o, expected_state = torch_chunk_gated_delta_rule(
        *arguments, initial_state=inputs["initial_state"], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert_close(o, expected_o.double(), torch.float32)
    assert_close(states[:, -1], expected_state.double(), torch.float32)


def test_a_chain_equals_the_kimi_delta_attention_of_transformers(backend):
    generator = torch.Generator().manual_seed(9)
    inputs = delta_inputs(generator, 2, 9, heads=1, key_heads=1, key_width=8, width=6, per_channel=True)
    inputs = cast(inputs, torch.float32)
    o, states = run(backend, inputs, TreeTables.from_parents(torch.arange(-1, 8)[None]), torch.float32)
    arguments = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    expected_o, expected_state = recurrent_kimi_delta_attention(
        *arguments, initial_state=inputs["initial_state"], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert_close(o, expected_o.double(), torch.float32)
    assert_close(states[:, -1], expected_state.double(), torch.float32)


@per_channel
def test_rows_may_accept_different_numbers_of_nodes(backend, per_channel):
    generator = torch.Generator().manual_seed(10)
    dtype = DTYPES[backend]
    device = device_of(backend)
    tables = TreeTables.from_parents(torch.tensor([[-1, 0, 0, 2, 3, 4]], device=device))
    inputs = delta_inputs(generator, 5, 6, **SMALL, per_channel=per_channel)
    accepted = [-1, 0, 2, 3, 5]
    with use(backend):
        arguments = cast(inputs, dtype, device)
        _, replay = tree_delta(tables=tables, **arguments)
        before = arguments["initial_state"].clone()
        state = replay.advance(arguments["initial_state"], tables, torch.tensor(accepted, device=device))
    assert torch.equal(arguments["initial_state"], before)
    assert torch.equal(state[0], before[0])
    _, true_states = truth(cast(cast(inputs, dtype), torch.float64), TreeTables.from_parents(tables.parents.cpu()))
    for row, node in enumerate(accepted[1:], start=1):
        assert_close(state[row].double().cpu(), true_states[row, node], dtype)


def test_pairs_of_channels_are_held_some_rows_at_a_time(monkeypatch):
    generator = torch.Generator().manual_seed(11)
    tables = random_tables(generator, 2, 11)
    inputs = delta_inputs(generator, 2, 11, **SMALL, per_channel=True)
    monkeypatch.setattr("draftwood.kernels.tree_delta.PAIR_BUDGET", 2 * 2 * 3 * 11 * 6)
    assert_equals_recurrence("torch", inputs, tables, torch.float64)


@pytest.mark.parametrize(
    "name, shape, message",
    [("k", (1, 4, 3, 6), "k has shape"), ("g", (1, 4, 3), "g has shape"), ("v", (1, 4, 3, 5), "g has shape")],
)
def test_shapes_that_do_not_fit_are_named(name, shape, message):
    generator = torch.Generator().manual_seed(12)
    inputs = delta_inputs(generator, 1, 4, **SMALL) | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=message):
        tree_delta(tables=random_tables(generator, 1, 4), **inputs)
