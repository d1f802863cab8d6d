import itertools

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from draftwood.configs.schema import OptimizerConfig
from draftwood.kernels.distill_loss import DistillHead, DistillWeights, distill_loss_reference, teacher_statistics
from draftwood.models.draft import EagleDraft
from draftwood.models.target import load_target
from draftwood.train.batches import (
    RowSizes,
    add_noise,
    collate,
    frequent_tokens,
    global_batches,
    micro_batches,
    vocab_coverage,
)
from draftwood.train.losses import Distillation
from draftwood.train.metrics import Meter, chain_survival, summarise
from draftwood.train.optim import Optimizers, schedule

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return load_target(tiny.build("llama"))


@pytest.fixture(scope="module")
def draft(target):
    torch.manual_seed(0)
    return EagleDraft.from_target(target, draft_vocab=torch.arange(5, 45)).double()


def rows_of(*layouts: str) -> list[dict]:
    """A row per layout, p a prompt token and r a reply token; the same layout has the same tokens."""
    made = []
    for layout in layouts:
        draw = np.random.default_rng(len(layout))
        mask = np.array([c == "r" for c in layout])
        made.append({"input_ids": draw.integers(3, tiny.VOCAB, len(layout)), "loss_mask": mask})
    return made


def batch_of(target, rows, numbers=None):
    numbers = list(range(len(rows))) if numbers is None else numbers
    head = DistillHead.build(target.head_weight.double())
    features = []
    for i in numbers:
        f = target.features(torch.as_tensor(rows[i]["input_ids"])[None])[0].double()
        features.append((f, teacher_statistics(f, head)))
    batch = collate(numbers, rows, features, target.hidden_dim, CPU)
    return type(batch)(**{**vars(batch), "features": batch.features.double()})


def distillation(target, draft, steps=3, **weights):
    head = DistillHead.build(target.head_weight.double(), draft.draft_vocab)
    return Distillation(draft, head, DistillWeights(**weights), steps, rows_per_chunk=4)


def test_gradient_reaches_exactly_the_rows_that_draft_inside_a_reply(target, draft):
    """Reply [a, b): not zero at a-1 to b-3; zero at b-2, in the prompt and in the padding."""
    layout = "ppppprrrrrrpprrrrpp"
    batch = batch_of(target, rows_of(layout, layout + "p" * 6))
    module = distillation(target, draft, steps=2)
    kept = []
    align = draft.align

    def recorded(*args, **kwargs):
        outputs = align(*args, **kwargs)
        for y in outputs:
            y.retain_grad()
        kept.extend(outputs)
        return outputs

    module.draft.align = recorded
    try:
        module(batch, 10).loss.backward()
    finally:
        del module.draft.align
    expected = set(range(5 - 1, 11 - 3 + 1)) | set(range(13 - 1, 17 - 3 + 1))
    for y in kept:
        for row in y.grad:
            assert {t for t in range(row.shape[0]) if row[t].abs().sum() > 0} == expected


def test_loss_is_the_reference_on_the_supervised_rows(target, draft):
    batch = batch_of(target, rows_of("pprrrrr", "pprrrprrrr"))
    module = distillation(target, draft, steps=2)
    outputs = draft.align(batch.features[:, :-2], batch.tokens[:, 1:-1], steps=2)
    places = [(0, t) for t in range(1, 5)] + [(1, t) for t in (1, 2, 5, 6, 7)]
    chosen = [torch.stack([y[b, t] for b, t in places]) for y in outputs]
    features = torch.stack([batch.features[b, t + 1] for b, t in places])
    expected = distill_loss_reference(chosen, features, module.head, module.weights, 9)
    torch.testing.assert_close(module(batch, 9).loss, expected)


def test_what_is_predicted_at_a_row_are_the_logits_of_the_token_after_next(target, draft):
    """A draft that were perfect, returning the target's own next features, has every rank 0 and the entropy as loss."""
    rows = rows_of("ppprrrrrrrr")
    batch = batch_of(target, rows)
    logits = target.model(torch.as_tensor(rows[0]["input_ids"])[None]).logits[0]
    module = Distillation(draft, DistillHead.build(target.head_weight.double()), DistillWeights(), 1)
    module.draft.align = lambda *_, **__: [batch.features[:, 1:-1]]
    try:
        out = module(batch, 1)
    finally:
        del module.draft.align
    entropy = torch.distributions.Categorical(logits=logits[3:-1].double()).entropy()
    assert out.ranks.eq(0).all()
    torch.testing.assert_close(out.parts[0, 1], entropy.sum(), rtol=1e-4, atol=1e-4)
    assert out.parts[0, 0] == 0


def gradients(module, shares, num_rows, noise=0.0):
    total = 0.0
    module.draft.zero_grad()
    for batch in shares:
        loss = module(batch, num_rows, add_noise(batch, noise, 7, 1)).loss
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten().clone() for p in module.draft.parameters() if p.grad is not None])


@settings(max_examples=15, deadline=None)
@given(
    layouts=st.lists(st.text("pr", min_size=3, max_size=20), min_size=2, max_size=5),
    cut=st.integers(1, 4),
    padding=st.integers(0, 5),
)
def test_loss_and_gradients_do_not_depend_on_padding_or_on_how_a_batch_is_split(target, draft, layouts, cut, padding):
    module = distillation(target, draft)
    rows = rows_of(*layouts)
    # one long row that trains nothing pads all the others
    rows.append({"input_ids": np.full(20 + padding, 5), "loss_mask": np.zeros(20 + padding, bool)})
    num_rows = 11
    everything = list(range(len(rows)))
    loss, grad = gradients(module, [batch_of(target, rows, everything)], num_rows, noise=0.2)
    cut = min(cut, len(layouts))
    shares = [batch_of(target, rows, part) for part in (everything[:cut], everything[cut:-1])]
    other_loss, other_grad = gradients(module, shares, num_rows, noise=0.2)
    assert loss == pytest.approx(other_loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(grad, other_grad, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("numbers", [[], [0]])
def test_a_share_without_rows_to_train_has_zero_loss_and_a_zero_gradient_for_every_parameter(target, draft, numbers):
    batch = batch_of(target, rows_of("pppppp"), numbers)
    module = distillation(target, draft)
    module.draft.zero_grad()
    out = module(batch, 3)
    out.loss.backward()
    assert out.loss.item() == 0 and out.ranks.shape == (3, 0)
    assert all(p.grad is not None and not p.grad.any() for p in module.draft.parameters())


def test_noise_is_on_the_inputs_alone_and_falls_with_the_length_of_the_row(target, draft):
    batch = batch_of(target, rows_of("pprr" + "r" * 28, "pprrrrrr"))
    noisy = add_noise(batch, 0.2, seed=1, epoch=0)
    for row, length in ((0, 32), (1, 8)):
        noise = noisy[row, :length] - batch.features[row, :length]
        bound = 0.1 * 512 / length
        assert 0.9 * bound < noise.abs().max() <= bound
        assert torch.equal(noisy[row, length:], batch.features[row, length:])
    assert not torch.equal(noisy, add_noise(batch, 0.2, seed=1, epoch=1))
    assert torch.equal(add_noise(batch, 0.0, seed=1, epoch=0), batch.features)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 99), min_size=1, max_size=300),
    batch_size=st.integers(1, 9),
    num_processes=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_every_row_is_seen_once_an_epoch_whatever_the_processes(lengths, batch_size, num_processes, accumulation, seed):
    size = batch_size * num_processes * accumulation
    batches = global_batches(np.array(lengths), size, seed, 3)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert len(batches) == -(-len(lengths) // size)
    assert batches == global_batches(np.array(lengths), size, seed, 3)
    for batch in batches:
        shares = [micro_batches(batch, batch_size, num_processes, rank) for rank in range(num_processes)]
        assert len({len(share) for share in shares}) == 1
        assert sorted(i for share in shares for micro in share for i in micro) == sorted(batch)
        assert all(len(micro) <= batch_size for share in shares for micro in share)


def test_batches_hold_rows_of_similar_length_in_another_order_each_epoch():
    lengths = np.random.default_rng(0).integers(3, 1000, 2048)
    batches = global_batches(lengths, 8, seed=0, epoch=0)
    padded = sum(8 * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.1 * lengths.sum()
    assert batches != global_batches(lengths, 8, seed=0, epoch=1)
    assert batches != global_batches(lengths, 8, seed=1, epoch=0)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 9, 5]])
def test_a_dataset_reads_as_the_list_of_its_rows(lengths):
    rows = rows_of(*("p" + "r" * (n - 1) for n in lengths))
    table = Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in rows]).with_format("numpy")
    ours, theirs = RowSizes.of(table), RowSizes.of(rows)
    assert ours.digest == theirs.digest
    assert ours.lengths.tolist() == theirs.lengths.tolist() == lengths
    assert ours.supervised.tolist() == theirs.supervised.tolist() == [n - 2 for n in lengths]


def test_the_same_tokens_cut_otherwise_are_other_rows():
    cuts = ([[3, 4], [5]], [[3], [4, 5]], [[3, 4, 5]])
    rows = ([{"input_ids": ids, "loss_mask": [True] * len(ids)} for ids in cut] for cut in cuts)
    assert len({RowSizes.of(one).digest for one in rows}) == 3


def test_the_draft_vocabulary_is_what_replies_say_most():
    rows = [
        {"input_ids": [9, 9, 9, 4, 7, 4, 7, 4, 2], "loss_mask": [0, 0, 0, 1, 1, 1, 1, 1, 1]},
        {"input_ids": [9, 7], "loss_mask": [0, 1]},
    ]
    assert frequent_tokens(rows, 2, 20).tolist() == [4, 7]
    assert frequent_tokens(rows, 3, 20).tolist() == [2, 4, 7]
    assert vocab_coverage(rows, torch.tensor([4, 7]), 20) == 6 / 7
    assert vocab_coverage(rows, torch.tensor([9]), 20) == 0 and vocab_coverage([], torch.tensor([9]), 20) == 0
    with pytest.raises(ValueError, match="draft_vocab_size is 20"):
        frequent_tokens(rows, 20, 20)


def test_chain_survival_counts_runs_of_hits_down_the_diagonal_within_a_reply():
    supervised = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0]], dtype=torch.bool)
    places = supervised.flatten().nonzero()[:, 0]
    hits = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    alive, chains = chain_survival(hits, places, supervised)
    # step 1 at rows 1, 2, 5, 6; step 2 in the row after: 2 and 3; step 3 only from row 1, at row 3
    assert chains.tolist() == [5, 3, 1]
    assert alive.tolist() == [4, 2, 1]


def test_metrics_are_means_over_rows_however_they_were_batched(target, draft):
    rows = rows_of("pprrrrrrr", "pprrrrrprrrr", "prrrrrr")
    module = distillation(target, draft)
    found = []
    for split in ([[0, 1, 2]], [[0], [1, 2]]):
        meter = Meter(3, CPU)
        for numbers in split:
            batch = batch_of(target, rows, numbers)
            meter.add(module(batch, 1), batch)
        found.append(summarise(meter.sums, module.weights))
    whole = batch_of(target, rows)
    assert found[0].num_rows == int(whole.supervised.sum())
    assert found[0].loss == pytest.approx(module(whole, found[0].num_rows).loss.item())
    assert found[0].acceptance_length == pytest.approx(1 + sum(a.survival for a in found[0].align))
    for a, b in zip(found[0].flat("x").values(), found[1].flat("x").values(), strict=True):
        assert a == pytest.approx(b)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_the_schedule_warms_up_to_one_and_decays_to_almost_nothing(kind):
    config = OptimizerConfig(schedule=kind, warmup_ratio=0.1)
    factors = [schedule(step, 100, config) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1.0
    assert all(a < b for a, b in itertools.pairwise(factors[:11]))
    if kind == "constant":
        assert set(factors[10:]) == {1.0}
    else:
        assert all(a > b > 0 for a, b in itertools.pairwise(factors[10:]))
        assert factors[-1] < 0.02


def test_muon_moves_matrices_in_orthogonal_steps_and_adamw_the_rest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.RMSNorm(24))
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = Optimizers(model, OptimizerConfig(name="muon", muon_lr=0.5, lr=0.25, schedule="constant"), 10)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers.step(5)
    weight, bias, scale = (p.detach() - b for p, b in zip(model.parameters(), before, strict=True))
    singular = torch.linalg.svdvals(weight.float()) / (0.5 * (24 / 16) ** 0.5)
    assert singular.min() > 0.5 and singular.max() < 1.3
    torch.testing.assert_close(bias.abs(), torch.full_like(bias, 0.25), rtol=1e-3, atol=0)
    torch.testing.assert_close(scale.abs(), torch.full_like(scale, 0.25), rtol=1e-3, atol=0)
    assert all(p.grad is None for p in model.parameters())
