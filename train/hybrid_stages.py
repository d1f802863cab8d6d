"""What trains a hybrid: each mixer against the attention layer it replaces, then the whole against the original."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftwood.models.hybrid import AttentionTaps, build_hybrid, initialise_scale, matrix_scan, mixer_for
from draftwood.train.head_divergence import head_divergence


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
        """[layers]: `relative_error` of each mixer against what its attention layer gave."""
        return torch.stack([relative_error(m(x), y) for m, x, y in zip(self.mixers, inputs, outputs, strict=True)])

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
    """The hybrid as a whole: KL to the original's next-token distribution, and what its mixers give on the way.

    The second is the error of every mixer, fed with the hybrid's own states, against its attention layer in the
    original; it tells each mixer what to correct where the KL alone only tells all of them together.
    """

    def __init__(self, model: Any, mixers: dict[int, nn.Module], mixer_weight: float, compiled: bool = False):
        """`compiled`: with the layers of both models and the loss through `torch.compile`."""
        super().__init__()
        self.original = (model,)
        states = {layer: mixer.state_dict() for layer, mixer in mixers.items()}
        hybrid = build_hybrid(model, states).to(model.device, model.dtype).requires_grad_(False)
        self.kept = [_Kept(mixer) for mixer in mixers.values()]  # the very modules: they stay float32 and train
        for layer, kept in zip(mixers, self.kept, strict=True):
            hybrid.model.layers[layer].mamba = kept
        self.hybrid = hybrid
        self.taps = AttentionTaps(model, list(mixers))
        self.mixer_weight, self.compiled = mixer_weight, compiled
        if compiled:
            _compile_layers(model, hybrid)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        original = self.original[0]
        with torch.no_grad(), self.taps.caught():
            wanted = original.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
        found = self.hybrid.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
        kl = head_divergence(found, wanted, original.get_output_embeddings().weight, self.compiled)
        errors = [relative_error(k.output, y) for k, y in zip(self.kept, self.taps.outputs, strict=True)]
        error = torch.stack(errors).mean()
        return {"loss": kl + self.mixer_weight * error, "kl": kl.detach(), "error": error.detach()}


class _Kept(nn.Module):
    """A mixer whose last output stays at hand."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.mixer = mixer
        self.output: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.output = self.mixer(*args, **kwargs)
        return self.output


def _compile_layers(model: Any, hybrid: Any) -> None:
    """Compiles what has no hook in it, layer by layer, so that equal layers share what is compiled."""
    parts = [layer.mlp for layer in model.model.layers]
    for layer in hybrid.model.layers:
        parts += [layer.mamba.mixer, layer.feed_forward] if hasattr(layer, "mamba") else [layer]
    for part in parts:
        part.forward = torch.compile(part.forward)


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """The squared error of `found` over the power of `wanted`, both of one shape, as []."""
    return (found.float() - wanted.float()).square().sum() / wanted.float().square().sum()


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
