"""What the Triton kernels share. Import this and the `*_triton` modules only where a kernel is really launched.

Every kernel is unproven on a GPU until `scripts/gpu_check.py` has run on one; its values are tested in the interpreter,
its machine code is compiled for sm_80, sm_90 and gfx942.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.tables import TreeTables

# A product of blocks needs at least this many rows and columns.
LEAST_BLOCK = 16
# Nodes that one program handles at a time; a larger tree is walked in blocks.
MOST_NODES = 64

Launch = tuple[Any, tuple[int, ...], dict[str, Any]]
_recorded: list[Launch] | None = None


def launch(kernel: Any, grid: tuple[int, ...], near: Tensor, **arguments: Any) -> None:
    """Run `kernel` on the device of `near`."""
    if _recorded is not None:
        _recorded.append((kernel, grid, arguments))
        return
    if near.device.type == "cuda":
        with torch.cuda.device(near.device):
            kernel[grid](**arguments)
    else:
        kernel[grid](**arguments)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Collect the launches made inside the block instead of running them: to compile without a GPU."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def block(size: int, most: int | None = None) -> int:
    """The power of two that covers `size`, from `LEAST_BLOCK` to `most`."""
    covered = max(LEAST_BLOCK, triton.next_power_of_2(size))
    return covered if most is None else min(covered, most)


def accumulator(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


def native_dot(left: Tensor, right: Tensor) -> bool:
    """Whether a product takes its operands as they are; the interpreter would multiply the raw bits of bfloat16."""
    return left.dtype == right.dtype and not triton.knobs.runtime.interpret


def path_arguments(tables: TreeTables) -> dict[str, Tensor | int]:
    """What a kernel needs to walk from the root down to a node: the look-back table and the depths."""
    steps = tables.max_depth + 1
    shared = tables.num_rows == 1
    return {
        **{"seen": tables.lookback(steps), "seen_b": 0 if shared else tables.num_nodes * steps, "steps": steps},
        **{"depth": tables.depth, "depth_b": 0 if shared else tables.num_nodes},
    }


def strides(name: str, tensor: Tensor | None, letters: str) -> dict[str, int]:
    """Arguments `<name>_<letter>` with the strides of `tensor`; 0 in a dimension of size 1, so that it broadcasts."""
    names = [f"{name}_{letter}" for letter in letters]
    if tensor is None:
        return dict.fromkeys(names, 0)
    pairs = zip(names, tensor.shape, tensor.stride(), strict=True)
    return {argument: 0 if size == 1 else stride for argument, size, stride in pairs}


@triton.jit
def softplus(x):
    """log(1 + exp(x)) without overflow, and without losing small values: log(1 + u) = u log(w) / (w - 1), w = 1 + u."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def silu(x):
    # exp(-|x|) does not overflow.
    u = tl.exp(-tl.abs(x))
    return x * tl.where(x >= 0, 1.0, u) / (1.0 + u)


@triton.jit
def time_steps(dt, read, bias, smallest, largest, SOFTPLUS: tl.constexpr, ACC: tl.constexpr):
    """The processed time step (`kernels.decay.discretize`) at the pointers `dt`, 0 where not `read`."""
    step = tl.load(dt, mask=read, other=0.0).to(ACC) + bias
    if SOFTPLUS:
        step = softplus(step)
    step = tl.minimum(tl.maximum(step, smallest), largest)
    return tl.where(read, step, 0.0)
