"""What trains a hybrid: each mixer against the attention layer it replaces, then the whole against the original."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftwood.kernels.distill_loss import DistillHead, DistillWeights, distill_loss
from draftwood.models.hybrid import AttentionTaps, build_hybrid, initialise_scale, matrix_scan, mixer_for


class Agreement(NamedTuple):
    """Mean over tokens: KL(original, hybrid) in nats, and the share where both have the same likeliest token."""

    kl: float
    top1: float


class Mixers(nn.Module):
    """A mixer for each of `layers`."""

    def __init__(self, model: Any, layers: Sequence[int]):
        super().__init__()
        self.layers = list(layers)
        self.mixers = nn.ModuleList(mixer_for(model, i) for i in layers)

    def forward(self, inputs: list[Tensor], outputs: list[Tensor]) -> Tensor:
        """[layers]: the squared error of each mixer over the power of what its attention layer gave."""
        found = zip(self.mixers, inputs, outputs, strict=True)
        return torch.stack([(m(x).float() - y.float()).square().sum() / y.float().square().sum() for m, x, y in found])

    def keep(self, layers: Sequence[int]) -> None:
        """Drops the mixers of other layers."""
        self.mixers = nn.ModuleList(self.mixers[self.layers.index(i)] for i in layers)
        self.layers = list(layers)


class Fitting(nn.Module):
    """Each mixer against its own attention layer, inside the original."""

    def __init__(self, model: Any, mixers: Mixers):
        super().__init__()
        self.original = (model,)  # in a tuple, so that its weights are not this module's
        self.mixers = mixers

    def _caught(self, ids: Tensor) -> AttentionTaps:
        taps = AttentionTaps(self.original[0], self.mixers.layers)
        with torch.no_grad(), taps.caught():
            self.original[0].model(ids, use_cache=False)
        return taps

    def scale(self, ids: Tensor) -> None:
        taps = self._caught(ids)
        for mixer, x, y in zip(self.mixers.mixers, taps.inputs, taps.outputs, strict=True):
            initialise_scale(mixer, x, y)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        taps = self._caught(ids)
        errors = self.mixers(taps.inputs, taps.outputs)
        return {"loss": errors.sum(), "error": errors.detach().mean()}


class Distilling(nn.Module):
    """The hybrid as a whole: cross-entropy of its next-token distribution against the original's."""

    def __init__(self, model: Any, mixers: dict[int, nn.Module]):
        super().__init__()
        self.original = (model,)
        states = {layer: mixer.state_dict() for layer, mixer in mixers.items()}
        hybrid = build_hybrid(model, states).to(model.device, model.dtype).requires_grad_(False)
        for layer, mixer in mixers.items():  # the very modules: they stay float32 and train
            hybrid.model.layers[layer].mamba = mixer
        self.hybrid = hybrid
        self.head = DistillHead.build(model.get_output_embeddings().weight, dtype=torch.bfloat16)
        self.weights = DistillWeights(feature=0.0, ce=1.0, topk=0.0)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            wanted = self.original[0].model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
        found = self.hybrid.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
        out = distill_loss([found], wanted, self.head, self.weights, num_rows=len(found))
        return {"loss": out.loss}


@contextmanager
def lean_precision(device_type: str) -> Iterator[None]:
    """bfloat16 where matmuls are, and the matrix form of the scan."""
    with torch.autocast(device_type, torch.bfloat16), matrix_scan():
        yield


@torch.no_grad()
def measure(model: Any, hybrid: Any, blocks: Tensor) -> Agreement:
    """How well `hybrid` agrees with `model` on `blocks` [N, T], by plain forwards of both."""
    found = [agreement(model(b[None], use_cache=False).logits, hybrid(b[None], use_cache=False).logits) for b in blocks]
    return Agreement(*(sum(values) / len(found) for values in zip(*found, strict=True)))


def agreement(wanted: Tensor, given: Tensor) -> Agreement:
    """Of logits [..., V]."""
    p, q = wanted.float().log_softmax(-1), given.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return Agreement(float(kl), float((p.argmax(-1) == q.argmax(-1)).float().mean()))
