"""The one rule that picks an implementation: reference loops, vectorised torch, or a Triton kernel.

A tensor on a GPU takes the Triton kernel, any other takes torch. `use("torch")` overrides the rule inside a `with`
block, the environment variable `DRAFTWOOD_KERNELS` for a whole process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

from torch import Tensor

CHOICES = ("reference", "torch", "triton")
VARIABLE = "DRAFTWOOD_KERNELS"

_override: ContextVar[str | None] = ContextVar("draftwood_kernels", default=None)


def _checked(name: str, origin: str) -> str:
    if name not in CHOICES:
        raise ValueError(f"{origin} asks for the kernels {name!r}; the choices are {', '.join(CHOICES)}")
    return name


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@contextmanager
def use(name: str) -> Iterator[None]:
    """Take the implementation `name` for every operator called inside the block.

    Raises:
        ValueError: `name` is not one of `CHOICES`.
    """
    token = _override.set(_checked(name, "use()"))
    try:
        yield
    finally:
        _override.reset(token)


def implementation(tensor: Tensor) -> str:
    """Name of the implementation for operators on `tensor`, one of `CHOICES`.

    Raises:
        ValueError: the environment variable holds something else.
        RuntimeError: Triton is asked for where it can't run.
    """
    chosen = _override.get()
    if chosen is None and (from_environment := os.environ.get(VARIABLE)):
        chosen = _checked(from_environment, VARIABLE)
    if chosen is None:
        return "triton" if tensor.device.type == "cuda" and _has_triton() else "torch"
    if chosen == "triton":
        if not _has_triton():
            raise RuntimeError("the Triton kernels are asked for, but triton is not installed: pip install triton")
        if tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "the Triton kernels are asked for, but the tensors are on the CPU: move them to a GPU, "
                "or set TRITON_INTERPRET=1 before Python starts"
            )
    return chosen
