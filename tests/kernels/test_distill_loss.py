import os
import shutil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftwood.kernels.cases import device_of
from draftwood.kernels.dispatch import use
from draftwood.kernels.distill_loss import (
    DistillHead,
    DistillWeights,
    TeacherStatistics,
    distill_loss,
    distill_loss_reference,
    teacher_statistics,
)
from draftwood.kernels.distill_terms import reference_parts

needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="needs a C++ compiler")


def problem(rows, dim=7, vocab=23, draft_size=None, steps=2, seed=0, scale=1.3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64)
    draft_vocab = None if draft_size is None else torch.randperm(vocab, generator=generator)[:draft_size]
    features = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    outputs = [
        (features + torch.randn(rows, dim, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for _ in range(steps)
    ]
    return outputs, features.to(dtype), DistillHead.build(weight, draft_vocab, scale, dtype)


def gradients(loss, outputs):
    return torch.autograd.grad(loss, outputs)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12),
    rows_per_chunk=st.integers(1, 13),
    draft_size=st.sampled_from([None, 1, 5, 22, 23]),
    steps=st.integers(1, 3),
    k=st.sampled_from([1, 3, 10, 40]),
    terms=st.sampled_from([(1.0, 0.1, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.5, 2.0, 0.3)]),
    acceptance=st.sampled_from([(0.0, None), (1.0, None), (0.7, 3.0), (2.0, 0.5)]),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_loss_and_gradient_equal_the_full_matrix_form(
    rows, rows_per_chunk, draft_size, steps, k, terms, acceptance, weighted, seed
):
    outputs, features, head = problem(rows, draft_size=draft_size, steps=steps, seed=seed)
    weights = DistillWeights(*terms, k, (1.0, 0.5, 0.25)[:steps] if weighted else None, *acceptance)
    expected = distill_loss_reference(outputs, features, head, weights, 17)
    found = distill_loss(outputs, features, head, weights, 17, rows_per_chunk=rows_per_chunk)
    torch.testing.assert_close(found.loss, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(gradients(3 * found.loss, outputs), gradients(3 * expected, outputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_reference_is_the_published_loss_on_a_case_done_by_hand():
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    feature = torch.tensor([[torch.log(torch.tensor(2.0)).item(), 0.0]], dtype=torch.float64)
    p = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64) / 3.5
    output = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    log_q = torch.log_softmax(torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64), 0)
    smooth_l1 = (0.5 * feature[0, 0] ** 2 + 1.5) / 2
    expected = smooth_l1 - 0.1 * (p * log_q).sum() - (p[:2] * log_q[:2]).sum()
    head = DistillHead.build(weight)
    weights = DistillWeights(1.0, 0.1, 1.0, k=2)
    torch.testing.assert_close(distill_loss_reference([output], feature, head, weights, 1), expected)
    torch.testing.assert_close(distill_loss([output], feature, head, weights, 1).loss, expected)


def test_topk_term_keeps_the_mass_of_the_whole_vocabulary_when_the_draft_vocabulary_is_reduced():
    """Two heads that differ only in a token the draft cannot say: ce is the same, topk shrinks by the mass it takes."""
    outputs, features, head = problem(4, draft_size=22, steps=1, scale=1.0)
    absent = int((head.positions < 0).nonzero())
    louder = head.weight.clone()
    louder[absent] = features.mean(0) * 3
    weights = DistillWeights(0.0, 1.0, 1.0, k=5)
    before = distill_loss(outputs, features, head, weights, 1)
    other = DistillHead(louder, head.draft_weight, head.positions, head.scale)
    after = distill_loss(outputs, features, other, weights, 1)
    torch.testing.assert_close(before.parts[:, 1], after.parts[:, 1])
    assert (before.parts[:, 2] - after.parts[:, 2]).abs().item() > 1e-3


@pytest.mark.parametrize("draft_size", [None, 9])
def test_given_statistics_change_nothing(draft_size):
    outputs, features, head = problem(11, draft_size=draft_size)
    statistics = teacher_statistics(features, head, rows_per_chunk=4)
    torch.testing.assert_close(statistics.normaliser, torch.logsumexp(head.scale * features @ head.weight.T, -1))
    ours = distill_loss(outputs, features, head, DistillWeights(), 11, statistics)
    theirs = distill_loss(outputs, features, head, DistillWeights(), 11)
    torch.testing.assert_close(ours.loss, theirs.loss)
    assert torch.equal(ours.ranks, theirs.ranks)


def test_parts_and_ranks_are_those_of_the_full_logits():
    outputs, features, head = problem(40, draft_size=12, steps=2)
    found = distill_loss(outputs, features, head, DistillWeights(), 1, rows_per_chunk=7)
    greedy = (features @ head.weight.T).argmax(-1)
    for j, y in enumerate(outputs):
        logits = y @ head.draft_weight.T
        for r in range(40):
            position = int(head.positions[greedy[r]])
            rank = 12 if position < 0 else int((logits[r] > logits[r, position]).sum())
            assert found.ranks[j, r] == rank
    alone = [
        distill_loss(outputs, features, head, DistillWeights(*terms), 1).loss
        for terms in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    ]
    torch.testing.assert_close(found.parts.sum(0)[:3], torch.stack(alone))
    assert not found.parts[:, 3].any()


def test_a_tie_for_the_first_place_has_one_winner():
    head = DistillHead.build(torch.eye(4, dtype=torch.float64))
    features = torch.eye(4, dtype=torch.float64)
    flat = torch.zeros(4, 4, dtype=torch.float64)
    ranks = distill_loss([flat], features, head, DistillWeights(), 1).ranks
    assert (ranks == 0).sum() == 1


def test_no_rows_give_zero_loss_and_a_gradient():
    outputs, features, head = problem(0)
    found = distill_loss(outputs, features, head, DistillWeights(), 5, teacher_statistics(features, head))
    assert found.loss.item() == 0
    assert all(g.shape == (0, 7) for g in gradients(found.loss, outputs))


def test_half_precision_is_close_and_sums_in_single():
    outputs, features, head = problem(64, dim=32, vocab=300, draft_size=100, steps=1, dtype=torch.bfloat16, scale=1.0)
    found = distill_loss(outputs, features, head, DistillWeights(), 64)
    exact = [y.detach().double().requires_grad_() for y in outputs]
    wide = DistillHead(head.weight.double(), head.draft_weight.double(), head.positions, 1.0)
    expected = distill_loss_reference(exact, features.double(), wide, DistillWeights(), 64)
    assert found.parts.dtype == found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss.double(), expected, rtol=3e-3, atol=0)
    grad, truth = gradients(found.loss, outputs)[0].double(), gradients(expected, exact)[0]
    assert (grad - truth).norm() / truth.norm() < 2e-2


def test_float32_outputs_under_autocast_keep_the_precision_of_the_head():
    outputs, features, head = problem(8, dtype=torch.float32)
    plain = distill_loss(outputs, features, head, DistillWeights(), 8).loss
    with torch.autocast("cpu", torch.bfloat16):
        inside = distill_loss(outputs, features, head, DistillWeights(), 8).loss
    assert torch.equal(plain, inside)


def test_extreme_logits_stay_finite():
    outputs, features, head = problem(6, dtype=torch.float32)
    huge = [(y.detach() * 1e3).requires_grad_() for y in outputs]
    found = distill_loss(huge, features * 1e3, head, DistillWeights(), 6)
    assert found.loss.isfinite()
    assert all(g.isfinite().all() for g in gradients(found.loss, huge))


def test_no_more_than_the_chunk_has_logits_at_a_time():
    """Counts the largest tensor that any operation makes, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    self.seen = max(self.seen, tensor.numel())
            return out

    outputs, features, head = problem(200, dim=4, vocab=1000, draft_size=500)
    with Largest() as largest:
        loss = distill_loss(outputs, features, head, DistillWeights(), 200, rows_per_chunk=10).loss
        loss.backward()
    assert largest.seen <= 10 * 1000


def test_wrong_shapes_are_named():
    outputs, features, head = problem(3)
    with pytest.raises(ValueError, match="align step 2"):
        distill_loss([outputs[0], outputs[1][:2]], features, head, DistillWeights(), 1)
    with pytest.raises(ValueError, match="1 step weights for 2 align steps"):
        distill_loss(outputs, features, head, DistillWeights(steps=(1.0,)), 1)


def test_acceptance_term_is_how_often_rejection_sampling_keeps_a_draft_token():
    """By enumeration: a token drawn from q is kept with min(1, p/q), where p has mass that the draft cannot say."""
    outputs, features, head = problem(5, draft_size=9, steps=1)
    p = torch.softmax(head.scale * features @ head.weight.T, -1)[:, torch.argsort(head.positions)[-9:]]
    q = torch.softmax(head.scale * outputs[0].detach() @ head.draft_weight.T, -1)
    kept = (q * (p / q).clamp(max=1)).sum(-1)
    found = distill_loss(outputs, features, head, DistillWeights(0.0, 0.0, 0.0, acceptance=1.0), 1)
    torch.testing.assert_close(found.loss, -torch.log(kept).sum())
    mixture = DistillWeights(0.0, 0.0, 0.0, acceptance=1.0, acceptance_eta=1e6)
    torch.testing.assert_close(distill_loss(outputs, features, head, mixture, 1).loss, (1 - kept).sum())


def test_acceptance_has_a_finite_gradient_where_nothing_would_be_accepted(fast_backend):
    _, features, head = problem(2, dtype=torch.float32)
    device = device_of(fast_backend)
    features, head = features.to(device), DistillHead.build(head.weight.to(device), None, head.scale)
    huge = [(-1e3 * features).requires_grad_()]
    with use(fast_backend):
        found = distill_loss(huge, features * 1e3, head, DistillWeights(acceptance=1.0), 6)
    assert found.loss.isfinite() and gradients(found.loss, huge)[0].isfinite().all()


def assert_is_the_reference(
    rows, rows_per_chunk, draft_size, steps, acceptance, seed, device="cpu", dtype=torch.float64, compiled=False
):
    """Loss, gradient, parts and ranks; looser where `dtype` is float32."""
    outputs, features, head = problem(rows, draft_size=draft_size, steps=steps, seed=seed)
    weights = DistillWeights(1.0, 0.3, 0.6, 4, None, *acceptance)
    there = [y.detach().to(device, dtype).requires_grad_() for y in outputs]
    positions = None if head.positions is None else head.positions.to(device)
    moved = DistillHead(head.weight.to(device, dtype), head.draft_weight.to(device, dtype), positions, head.scale)
    options = {"rows_per_chunk": rows_per_chunk, "compiled": compiled}
    found = distill_loss(there, features.to(device, dtype), moved, weights, 5, **options)
    with use("torch"):
        expected = distill_loss_reference(outputs, features, head, weights, 5)
        parts, ranks = reference_parts(outputs, features, head, weights)
    close = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.loss.cpu().double(), expected, **close)
    torch.testing.assert_close(found.parts.cpu().double(), parts, **close)
    assert torch.equal(found.ranks.cpu(), ranks)
    for a, b in zip(gradients(found.loss, there), gradients(expected, outputs), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, **close)


PROBLEMS = {
    "rows": st.integers(1, 4),
    "rows_per_chunk": st.sampled_from([1, 7, 100]),
    "draft_size": st.sampled_from([None, 5, 22]),
    "steps": st.integers(1, 2),
    "acceptance": st.sampled_from([(0.0, None), (1.0, None), (0.7, 3.0)]),
    "seed": st.integers(0, 99),
}


@settings.get_profile("kernels")
@given(**PROBLEMS)
@example(rows=3, rows_per_chunk=100, draft_size=5, steps=2, acceptance=(1.0, None), seed=0)
@example(rows=3, rows_per_chunk=100, draft_size=None, steps=2, acceptance=(0.7, 3.0), seed=1)
def test_every_implementation_gives_the_loss_its_gradient_parts_and_ranks(backend, **problem):
    with use(backend):
        assert_is_the_reference(**problem, device=device_of(backend))


@pytest.fixture
def uncompiled():
    with torch.compiler.set_stance("force_eager"):
        yield


@settings.get_profile("kernels")
@given(**PROBLEMS)
@example(rows=3, rows_per_chunk=100, draft_size=5, steps=2, acceptance=(1.0, None), seed=0)
@example(rows=3, rows_per_chunk=100, draft_size=None, steps=2, acceptance=(0.7, 3.0), seed=1)
def test_what_is_compiled_gives_the_loss_its_gradient_parts_and_ranks(**problem):
    with torch.compiler.set_stance("force_eager"):
        assert_is_the_reference(**problem, compiled=True)


def test_in_what_is_compiled_a_tie_has_the_winner_of_argmax(uncompiled):
    head = DistillHead.build(torch.eye(4, dtype=torch.float64))
    outputs = torch.tensor([[0.0, 1.0, 1.0, 0.0]] * 4, dtype=torch.float64)
    ranks = distill_loss([outputs], torch.eye(4, dtype=torch.float64), head, DistillWeights(), 1, compiled=True).ranks
    assert ranks.tolist() == [[2, 0, 1, 2]]


def test_extreme_logits_stay_finite_in_what_is_compiled(uncompiled):
    outputs, features, head = problem(6, dtype=torch.float32)
    for acceptance in (0.0, 1.0):
        huge = [(-1e3 * y.detach()).requires_grad_() for y in outputs]
        weights = DistillWeights(acceptance=acceptance)
        loss = distill_loss(huge, features * 1e3, head, weights, 6, compiled=True).loss
        assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, huge))


@needs_compiler
def test_one_program_serves_every_number_of_rows():
    """Rows in chunks of 5 and 3, then of 7."""
    assert_is_the_reference(8, 15, None, 2, (0.0, None), 0, compiled=True)
    programs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert programs > 0
    assert_is_the_reference(7, 100, None, 2, (0.0, None), 1, compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == programs


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("draft_size", [None, 5])
@pytest.mark.parametrize("acceptance", [(0.0, None), (1.0, None), (0.7, 3.0)])
def test_compiled_it_is_the_reference(acceptance, draft_size, dtype):
    torch._dynamo.reset()  # more programs than torch keeps of a function
    assert_is_the_reference(7, 9, draft_size, 2, acceptance, 0, dtype=dtype, compiled=True)


@needs_compiler
@pytest.mark.slow
def test_compiled_bfloat16_statistics_are_those_of_its_logits():
    _, features, head = problem(6, dim=16, vocab=300, dtype=torch.bfloat16, scale=1.0)
    found = teacher_statistics(features, head, 4, compiled=True)
    logits = (features @ head.weight.T).float()
    torch.testing.assert_close(found.normaliser, torch.logsumexp(logits, -1))
    assert torch.equal(found.argmax, logits.argmax(-1))


def test_of_equal_logits_far_apart_the_first_wins(fast_backend):
    """Further apart than a program reads at a time; each is the greedy token of a row."""
    device = device_of(fast_backend)
    weight = torch.zeros(4500, 1, dtype=torch.float64, device=device)
    weight[[7, 4400]] = 1.0
    ones = torch.ones(2, 1, dtype=torch.float64, device=device)
    head = DistillHead.build(weight)
    known = TeacherStatistics(torch.logsumexp(ones @ weight.T, -1), torch.tensor([7, 4400], device=device))
    with use(fast_backend):
        assert distill_loss([ones], ones, head, DistillWeights(), 1, known).ranks.tolist() == [[0, 1]]
        assert teacher_statistics(ones, head).argmax.tolist() == [7, 7]


def test_no_rows_launch_nothing(fast_backend):
    outputs, features, head = problem(0)
    with use(fast_backend):
        found = distill_loss(outputs, features, head, DistillWeights(acceptance=1.0), 5)
    assert found.loss.item() == 0


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_bfloat16_rows_of_several_blocks(fast_backend, acceptance):
    """More tokens than a program reads at a time; sums in float32."""
    options = dict(dim=16, vocab=4500, steps=1, dtype=torch.bfloat16, scale=0.5)
    outputs, features, head = problem(3, **options)
    weights = DistillWeights(acceptance=acceptance)
    with use(fast_backend):
        found = distill_loss(outputs, features, head, weights, 3)
    exact = [y.detach().double().requires_grad_() for y in outputs]
    wide = DistillHead.build(head.weight.double(), None, 0.5)
    expected = distill_loss_reference(exact, features.double(), wide, weights, 3)
    torch.testing.assert_close(found.loss.double(), expected, rtol=1e-2, atol=0)
    grad, truth = gradients(found.loss, outputs)[0].double(), gradients(expected, exact)[0]
    assert (grad - truth).norm() / truth.norm() < 3e-2
