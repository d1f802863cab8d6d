"""The mixers of a hybrid in one small file: matrices as int8 rows with a scale each, everything else as it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MIXERS = "mixers.safetensors"
_SCALE = ".scale"


def save_mixers(mixers: Mapping[int, Mapping[str, "Tensor"]], path: Path) -> None:
    """Writes the state of each layer's mixer."""
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for layer, state in mixers.items():
        for name, weight in state.items():
            key = f"{layer}.{name}"
            if weight.ndim == 2:
                scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
                tensors[key] = (weight.float() / scale).round().to(torch.int8).contiguous()
                tensors[key + _SCALE] = scale
            else:
                tensors[key] = weight.float().contiguous()
    save_file(tensors, path)


def load_mixers(path: Path) -> dict[int, dict[str, "Tensor"]]:
    """The float32 state of each layer's mixer."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    mixers: dict[int, dict[str, Tensor]] = {}
    for key, weight in tensors.items():
        if not key.endswith(_SCALE):
            layer, name = key.split(".", 1)
            scale = tensors.get(key + _SCALE)
            mixers.setdefault(int(layer), {})[name] = weight if scale is None else weight.float() * scale
    return mixers


def convert_hybrid(base: Path, shipped: Path, folder: Path) -> None:
    """Writes the hybrid of transformers folder `base` with the mixers in `shipped` as a float32 Bamba folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from draftwood.models.hybrid import build_hybrid

    model = AutoModelForCausalLM.from_pretrained(base)
    build_hybrid(model, load_mixers(shipped / MIXERS)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
