"""The chunked scan is the recurrence, whatever the chunk, the decays and the state it starts from."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwood.models import harmony_scan
from draftwood.models.harmony_scan import ChunkStates, Update

EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def recurrence(update, initial, queries):
    x, B, log_decay = update
    repeats = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(repeats, 2), queries.repeat_interleave(repeats, 2)
    state, outputs = initial, []
    for t in range(x.shape[1]):
        state = log_decay[:, t].exp()[..., None, None] * state + x[:, t, :, :, None] * B[:, t, :, None, :]
        outputs.append((state * C[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, 1), state


def random_scan(length, groups, largest, seed, dtype=torch.float64):
    torch.manual_seed(seed)
    x = torch.randn(2, length, 4, 3, dtype=dtype)
    B, C = torch.randn(2, 2, length, groups, 5, dtype=dtype)
    # decays over many orders of magnitude in one sequence
    log_decay = -largest * torch.rand(2, length, 4, dtype=dtype) ** 6
    return Update(x, B, log_decay), C, torch.randn(2, 4, 3, 5, dtype=dtype)


@given(
    length=st.integers(1, 45),
    groups=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from([1, 3, 8, 64]),
    largest=st.sampled_from([1e-3, 1.0, 5e4]),
    seed=st.integers(0, 99),
    is_fresh=st.booleans(),
)
@EXAMPLES
def test_chunks_equal_the_recurrence(length, groups, chunk, largest, seed, is_fresh):
    update, queries, initial = random_scan(length, groups, largest, seed)
    whole, harmony_scan.CHUNK = harmony_scan.CHUNK, chunk
    try:
        states = ChunkStates(update, None if is_fresh else initial)
        got = states.read(queries)
    finally:
        harmony_scan.CHUNK = whole
    want, final = recurrence(update, torch.zeros_like(initial) if is_fresh else initial, queries)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(states.final, final, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("largest", [1.0, 5e4])
def test_float32_is_finite_and_close_to_the_float64_recurrence(largest):
    update, queries, initial = random_scan(130, 2, largest, 7)
    want, _ = recurrence(update, initial, queries)
    narrow = ChunkStates(Update(*(t.float() for t in update)), initial.float()).read(queries.float())
    torch.testing.assert_close(narrow.double(), want, rtol=1e-4, atol=1e-4)


def test_gradients_equal_those_of_the_recurrence():
    update, queries, initial = random_scan(10, 2, 3.0, 1)
    inputs = [t.requires_grad_() for t in (*update, queries, initial)]
    weight = torch.randn(2, 10, 4, 3, dtype=torch.float64)
    whole, harmony_scan.CHUNK = harmony_scan.CHUNK, 4
    try:
        states = ChunkStates(update, initial)
        got = torch.autograd.grad((states.read(queries) * weight).sum() + states.final.sum(), inputs)
    finally:
        harmony_scan.CHUNK = whole
    y, final = recurrence(update, initial, queries)
    want = torch.autograd.grad((y * weight).sum() + final.sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
