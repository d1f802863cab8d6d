"""The loss of a draft with its own head is its formula, in value and gradient, whatever the chunks."""

import pytest
import torch

from draftwood.kernels.distill_loss import DistillHead, DistillWeights, distill_loss, teacher_statistics
from draftwood.kernels.own_head_loss import own_head_loss
from draftwood.models.memory import peak_memory

WEIGHTS = DistillWeights(feature=0.0, ce=0.3, topk=0.7, k=3, steps=(1.0, 0.8), acceptance=0.4, acceptance_eta=2.0)


def problem(is_reduced, rows=7, seed=0):
    torch.manual_seed(seed)
    target = torch.randn(23, 6, dtype=torch.float64)
    head = DistillHead.build(target, torch.tensor([1, 4, 5, 9, 20]) if is_reduced else None, 0.7)
    weight = torch.randn(len(head.draft_weight), 6, dtype=torch.float64, requires_grad=True)
    outputs = [torch.randn(rows, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    return outputs, weight, torch.randn(rows, 6, dtype=torch.float64), head


def by_formula(outputs, weight, features, head, num_rows):
    p = torch.softmax(head.scale * features @ head.weight.T, -1)
    sayable = p if head.positions is None else p[:, [1, 4, 5, 9, 20]]
    r = sayable / sayable.sum(-1, keepdim=True)
    top = sayable.topk(WEIGHTS.k)
    total = 0.0
    for y, step in zip(outputs, WEIGHTS.steps, strict=True):
        log_q = torch.log_softmax(y @ weight.T, -1)
        ce, topk = -(r * log_q).sum(), -(top.values * log_q.gather(1, top.indices)).sum()
        alpha = torch.minimum(sayable, log_q.exp()).sum(-1)
        mix = torch.exp(-2.0 * alpha.detach())
        accepted = (mix * (r * (r.log() - log_q)).sum(-1) + (1 - mix) * (1 - alpha)).sum()
        total = total + step * (WEIGHTS.ce * ce + WEIGHTS.topk * topk + 0.4 * accepted)
    return total / num_rows


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_loss_and_gradients_equal_the_formula(is_reduced, rows_per_chunk):
    outputs, weight, features, head = problem(is_reduced)
    found = own_head_loss(outputs, weight, features, head, WEIGHTS, 5, rows_per_chunk=rows_per_chunk)
    expected = by_formula(outputs, weight, features, head, 5)
    torch.testing.assert_close(found.loss, expected, rtol=1e-11, atol=0)
    inputs = [weight, *outputs]
    for a, b in zip(torch.autograd.grad(found.loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_reduced", [False, True])
def test_with_the_targets_own_head_it_is_the_other_loss(is_reduced):
    outputs, _, features, head = problem(is_reduced)
    statistics = teacher_statistics(features, head)
    expected = distill_loss(outputs, features, head, WEIGHTS, 5, statistics)
    found = own_head_loss(outputs, head.draft_weight * head.scale, features, head, WEIGHTS, 5, statistics)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.parts[:, 1:], expected.parts[:, 1:])
    assert torch.equal(found.ranks, expected.ranks)


def test_no_rows_give_a_gradient_of_zero():
    outputs, weight, features, head = problem(False, rows=0)
    own_head_loss(outputs, weight, features, head, WEIGHTS, 1).loss.backward()
    assert outputs[0].grad is not None and weight.grad is not None and not weight.grad.any()


def test_a_weight_on_the_feature_term_is_refused():
    outputs, weight, features, head = problem(False)
    with pytest.raises(ValueError, match="align.feature_weight=0"):
        own_head_loss(outputs, weight, features, head, DistillWeights(), 1)


def test_under_autocast_the_products_keep_the_precision_of_the_head():
    outputs, weight, features, head = problem(True)
    single = [x.detach().float() for x in (*outputs, weight, features)]
    head = DistillHead(head.weight.float(), head.draft_weight.float(), head.positions, head.scale)

    def loss():
        return own_head_loss(single[:2], single[2], single[3], head, WEIGHTS, 5).loss

    plain = loss()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(), plain)


def test_in_bfloat16_softmax_and_sums_are_single():
    """Of small whole numbers, whose products bfloat16 holds exactly."""
    outputs, weight, features, head = problem(True, rows=64)
    halves = [x.detach().round().bfloat16() for x in (*outputs, weight, features)]
    narrow = DistillHead(head.weight.round().bfloat16(), head.draft_weight.round().bfloat16(), head.positions, 1.0)
    found = own_head_loss(halves[:2], halves[2], halves[3], narrow, WEIGHTS, 64)
    assert found.loss.dtype == found.parts.dtype == torch.float32
    wide = DistillHead(narrow.weight.double(), narrow.draft_weight.double(), head.positions, 1.0)
    exact = [x.double() for x in halves]
    expected = own_head_loss(exact[:2], exact[2], exact[3], wide, WEIGHTS, 64)
    torch.testing.assert_close(found.loss.double(), expected.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_does_not_grow_with_the_rows_beyond_a_chunk(dtype):
    hidden, vocab, chunk, steps = 4, 2048, 16, 2
    draw = torch.Generator().manual_seed(0)
    head = DistillHead.build(torch.randn(vocab, hidden, generator=draw).to(dtype))

    def peak_of(rows):
        weight = torch.randn(vocab, hidden, generator=draw, requires_grad=True)
        features = torch.randn(rows, hidden, generator=draw)
        outputs = [torch.randn(rows, hidden, generator=draw, requires_grad=True) for _ in range(steps)]
        statistics = teacher_statistics(features, head, chunk)
        with peak_memory(torch.device("cpu")) as peak:
            own_head_loss(outputs, weight, features, head, WEIGHTS, 1, statistics, chunk).loss.backward()
        return peak[0]

    growth = peak_of(4 * chunk) - peak_of(chunk)
    # The gradients of the outputs, twice where backward scales them, and the ranks: nothing that knows the vocabulary.
    assert growth <= 3 * chunk * steps * (2 * hidden * 4 + 8)
