"""What only a GPU can show of the distillation loss: that its Triton kernels are right there, and what they save."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.dispatch import use
from draftwood.kernels.distill_loss import DistillHead, DistillWeights, distill_loss, distill_loss_reference
from draftwood.kernels.gpu_bench import ALLOWED, Check, Timing, eager_us

WEIGHTS = {"": DistillWeights(), " acceptance": DistillWeights(acceptance=1.0, acceptance_eta=3.0)}


@dataclass(frozen=True)
class LossShape:
    """Sizes of one step's loss; the defaults are those of an 8B target with a vocabulary of 32,000."""

    rows: int = 2048
    width: int = 4096
    vocab: int = 32000
    steps: int = 3


SMOKE = LossShape(rows=6, width=8, vocab=50)


def checks(device: torch.device, shape: LossShape) -> Iterator[Check]:
    """The Triton loss and its gradients against the written-out loss and autograd in float64, on the same numbers."""
    for dtype, allowed in ALLOWED.items():
        outputs, features, head = _problem(device, shape, dtype)
        truth = [y.detach().double().requires_grad_() for y in outputs]
        exact = DistillHead.build(head.weight.double())
        for name, weights in WEIGHTS.items():
            with use("triton"):
                found = distill_loss(outputs, features, head, weights, shape.rows).loss
            expected = distill_loss_reference(truth, features.double(), exact, weights, shape.rows)
            gradients = torch.cat(torch.autograd.grad(found, outputs)).double()
            wanted = torch.cat(torch.autograd.grad(expected, truth))
            errors = {
                "loss": (found.double() - expected).abs() / expected.abs(),
                "gradient": (gradients - wanted).norm() / wanted.norm(),
            }
            for part, difference in errors.items():
                error = difference.item()
                error = error if error == error else float("inf")
                yield Check(f"distill_loss{name} {part}", shape.rows, str(dtype).removeprefix("torch."), error, allowed)


def timings(device: torch.device, shape: LossShape) -> Iterator[Timing]:
    """Forward and backward in bfloat16: Triton kernels, torch, and autograd with all logits in memory."""
    outputs, features, head = _problem(device, shape, torch.bfloat16)
    for name, weights in WEIGHTS.items():

        def lean(weights: DistillWeights = weights) -> Tensor:
            return distill_loss(outputs, features, head, weights, shape.rows).loss

        def naive(weights: DistillWeights = weights) -> Tensor:
            return distill_loss_reference(outputs, features, head, weights, shape.rows)

        times: list[float | None] = []
        notes = []
        for implementation, loss in (("triton", lean), ("torch", lean), ("torch", naive)):
            try:
                with use(implementation):
                    times.append(eager_us(_step(loss, outputs)))
            except RuntimeError as error:  # one that cannot be timed must not cost the other figures
                times.append(None)
                notes.append(f"{type(error).__name__}: {str(error)[:200]}")
        yield Timing(f"distill_loss{name}", shape.rows, None, times[0], times[1], None, "; ".join(notes))
        yield Timing(f"distill_loss{name} by autograd", shape.rows, None, times[2], None, None, "all logits in memory")


def _step(loss: Callable[[], Tensor], outputs: list[Tensor]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss(), outputs)


def _problem(device: torch.device, shape: LossShape, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, DistillHead]:
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(rows, shape.width, generator=generator)).to(device, dtype)

    head, features = DistillHead.build(draw(shape.vocab, shape.width**-0.5)), draw(shape.rows)
    return [(features + draw(shape.rows)).requires_grad_() for _ in range(shape.steps)], features, head
