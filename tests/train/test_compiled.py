import os
import shutil

import pytest
import tiny
import torch

from draftwood.kernels import distill_loss_compiled
from draftwood.kernels.distill_loss import DistillHead, DistillWeights
from draftwood.models.draft import EagleDraft
from draftwood.models.target import load_target
from draftwood.train.batches import RowSizes, collate
from draftwood.train.benchmark import SHAPES, benchmark_distill
from draftwood.train.compiled import check_compiler
from draftwood.train.features import FeatureSource
from draftwood.train.losses import Distillation

CPU = torch.device("cpu")


def test_a_missing_compiler_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"loop.compile .* no-such-compiler is not on the PATH: install one"):
        check_compiler(CPU)
    with pytest.raises(ValueError, match="no-such-compiler"):
        benchmark_distill(SHAPES["tiny"], align=(1,), compiled=True)
    check_compiler(torch.device("cuda"))


def steps(compiled):
    """Loss and gradients of a draft's weights for one batch of two rows, whose features come online."""
    target = load_target(tiny.build("llama"))
    head = DistillHead.build(target.head_weight)
    rows = [{"input_ids": torch.arange(3, 3 + n), "loss_mask": torch.ones(n, dtype=torch.bool)} for n in (9, 14)]
    assert RowSizes.of(rows).supervised.sum() > 0
    features = FeatureSource(target, rows, head, compiled=compiled)([0, 1])
    batch = collate([0, 1], rows, features, target.hidden_dim, CPU)
    torch.manual_seed(0)
    module = Distillation(EagleDraft.from_target(target), head, DistillWeights(), 3, 8, compiled=compiled)
    loss = module(batch, 20).loss
    return loss, torch.autograd.grad(loss, list(module.parameters()))


def assert_same_step():
    (loss, grads), (expected, truth) = steps(True), steps(False)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(grads, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_switch_reaches_the_loss_and_the_statistics(monkeypatch):
    seen = []

    def spy(name, function):
        monkeypatch.setattr(distill_loss_compiled, name, lambda *args: (seen.append(name), function(*args))[1])

    spy("weigh_", distill_loss_compiled.weigh_)
    spy("probabilities_", distill_loss_compiled.probabilities_)
    steps(False)
    assert not seen
    with torch.compiler.set_stance("force_eager"):
        steps(True)
    # of the statistics, then of the first chunk
    assert seen[:3] == ["probabilities_", "probabilities_", "weigh_"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="needs a C++ compiler")
def test_a_compiled_step_is_the_step():
    assert_same_step()


def test_what_is_compiled_is_the_step_before_it_is_compiled():
    with torch.compiler.set_stance("force_eager"):
        assert_same_step()
