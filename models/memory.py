"""Peak memory of a piece of work, counted in tensors, the same way on CPU and GPU."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensor storages made inside it and still alive; `peak_bytes` is the most there were.

    It sees what torch operators return, not the scratch space inside one operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage(), inputs)
        return out

    def _add(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in self._seen or key in inputs:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Yields a list whose only entry is, afterwards, the peak of bytes above what was there before."""
    result = [0]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield result
        torch.cuda.synchronize(device)
        result[0] = torch.cuda.max_memory_allocated(device) - before
        return
    with PeakMemory() as peak:
        yield result
    result[0] = peak.peak_bytes
