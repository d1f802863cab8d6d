"""Small host values on their way to the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def send(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """`values`, nested lists or a tensor, as a tensor on `device`.

    A plain copy to a GPU waits until the GPU has done all that was asked of it; one from pinned memory does not.
    """
    tensor = torch.as_tensor(values)
    if tensor.is_cpu and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
