"""Hidden states from inside a target, for drafts that read more than its last one (EAGLE-3, arXiv 2503.01840)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def tapped_forward(backbone: nn.Module, taps: tuple[int, ...], **inputs: Any) -> Tensor:
    """What each of the layers `taps` reads and the last hidden state, side by side, [B, T, (k + 1) H]."""
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            seen[layer] = args[0] if args else keywords["hidden_states"]

        return hook

    layers: Any = backbone.layers
    handles = [layers[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in taps]
    try:
        last = backbone(**inputs).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([*(seen[layer].to(last.dtype) for layer in taps), last], -1) if taps else last


def check_taps(taps: tuple[int, ...], present: tuple[int, ...], num_layers: int, name: str) -> None:
    """Raises:
    ValueError: layers that are not there or not in order, or a target that is tapped elsewhere.
    """
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= num_layers:
        raise ValueError(f"taps {list(taps)}: expected layers from 0 to {num_layers - 1} of {name}, in ascending order")
    if present and present != taps:
        raise ValueError(
            f"{name} is tapped at layers {list(present)} for another draft, this one needs {list(taps)}; load the "
            "target once more for it"
        )
