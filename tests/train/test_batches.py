"""Batches of rows of similar length: what padding they say they have is what there is, and it stays small."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.kernels.distill_loss import TeacherStatistics
from draftwood.train.batches import collate, global_batches, micro_batches, padding_share


@given(
    lengths=st.lists(st.integers(3, 40), min_size=1, max_size=80),
    batch_size=st.integers(1, 5),
    num_processes=st.integers(1, 3),
    accumulation=st.integers(1, 3),
)
def test_the_stated_padding_is_that_of_the_tensors(lengths, batch_size, num_processes, accumulation):
    rows = [{"input_ids": [5] * n, "loss_mask": [True] * n} for n in lengths]
    features = [(torch.ones(n, 1), TeacherStatistics(torch.ones(n), torch.ones(n, dtype=torch.int64))) for n in lengths]
    computed = real = 0
    for batch in global_batches(np.array(lengths), batch_size * num_processes * accumulation, seed=1, epoch=0):
        for rank in range(num_processes):
            for micro in filter(None, micro_batches(batch, batch_size, num_processes, rank)):
                tokens = collate(micro, rows, [features[i] for i in micro], 1, torch.device("cpu")).tokens
                computed += tokens.numel()
                real += int((tokens == 5).sum())
    share = padding_share(np.array(lengths), batch_size, num_processes, accumulation, seed=1)
    assert real == sum(lengths) and share == pytest.approx(1 - real / computed)


@pytest.mark.parametrize(("batch_size", "num_processes", "accumulation"), [(2, 1, 1), (8, 1, 1), (8, 4, 2), (64, 1, 1)])
def test_padding_stays_below_a_tenth_where_batches_drawn_at_random_have_half(batch_size, num_processes, accumulation):
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6, 1, 4000), 3, 2048).astype(int)
    assert padding_share(lengths, batch_size, num_processes, accumulation, seed=0) < 0.1
    drawn = random.permutation(len(lengths)).reshape(-1, 8)
    assert 1 - lengths.sum() / (8 * lengths[drawn].max(1)).sum() > 0.5
