"""Counts the calls at which a GPU would make the host wait."""

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Calls that give Python a value, and operators that do so inside, or whose result's shape depends on values.
_CALLS = {"tolist", "numpy", "cpu", "multinomial"}
_OPERATORS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
# Values given to these go to the device by a plain copy, which waits as well; `send` does not.
_COPIES = {"tensor", "as_tensor", "new_tensor"}


class _Operators(TorchDispatchMode):
    def __init__(self, reads: Counter[str]):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.reads[name] += name in _OPERATORS
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            self.reads["index by a mask"] += bool(masks)
        return func(*args, **(kwargs or {}))


class HostWaits(TorchFunctionMode):
    """Attributes:
    reads: how often a tensor's values went to the host, by the name of the call.
    copies: how often values went to the device by a copy that waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._operators = _Operators(self.reads)

    def __enter__(self) -> "HostWaits":
        self._operators.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operators.__exit__(*error)
        self.reads, self.copies = +self.reads, +self.copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.reads[name] += name in _CALLS
        self.copies[name] += name in _COPIES and (name == "new_tensor" or "device" in (kwargs or {}))
        return func(*args, **(kwargs or {}))
