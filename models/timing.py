"""How long a piece of work takes, on whatever device it runs."""

from collections.abc import Callable
from time import perf_counter

import torch


def elapsed_ms(device: torch.device, work: Callable[[], object]) -> float:
    """Milliseconds until `work` is done, what it queued on a GPU included and nothing that was queued before."""
    _synchronize(device)
    started = perf_counter()
    work()
    _synchronize(device)
    return 1e3 * (perf_counter() - started)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
