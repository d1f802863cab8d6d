"""Triton kernels of the Mamba-1 tree scan: every node walks its own path from the root. Unproven on a GPU.

The path is recomputed per node, which costs depth times the exponentials but needs no state in memory between nodes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.tables import TreeTables
from draftwood.kernels.triton_common import accumulator, launch, path_arguments, silu, strides, time_steps


@triton.jit
def tree_selective_kernel(
    x, dt, A, B, C, seen, depth, state, D, z, dt_bias, valid, y, step_out,
    x_b, x_d, x_n, dt_b, dt_d, dt_n, A_d, A_s, B_b, B_s, B_n, C_b, C_s, C_n, seen_b, depth_b,
    state_b, state_d, state_s, D_d, z_b, z_d, z_n, dt_bias_d, valid_b, valid_n,
    nodes, width, states, steps, smallest, largest,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr,
    SOFTPLUS: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """y [B, N, D] at one node, one block of channels; grid (channel blocks, N, B)."""
    row = tl.program_id(2).to(tl.int64)
    node = tl.program_id(1)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    in_width, in_states = d < width, s < states
    inside = in_width[:, None] & in_states[None, :]
    read = in_width
    if HAS_VALID:
        read = read & (tl.load(valid + row * valid_b + node * valid_n + d * 0, mask=read, other=0) != 0)
    bias = tl.load(dt_bias + d * dt_bias_d, mask=in_width, other=0.0).to(ACC) if HAS_BIAS else 0.0
    a = tl.load(A + d[:, None] * A_d + s[None, :] * A_s, mask=inside, other=0.0).to(ACC)
    places = state + row * state_b + d[:, None] * state_d + s[None, :] * state_s
    at = tl.load(places, mask=inside, other=0.0).to(ACC)
    seen += row * seen_b + node * steps
    last = tl.load(depth + row * depth_b + node)
    for above in range(0, last + 1):
        ancestor = tl.load(seen + (last - above))
        step = time_steps(dt + row * dt_b + d * dt_d + ancestor * dt_n, read, bias, smallest, largest, SOFTPLUS, ACC)
        own = tl.load(x + row * x_b + d * x_d + ancestor * x_n, mask=read, other=0.0).to(ACC)
        b = tl.load(B + row * B_b + s * B_s + ancestor * B_n, mask=in_states, other=0.0).to(ACC)
        at = tl.exp(step[:, None] * a) * at + (step * own)[:, None] * b[None, :]
    step = time_steps(dt + row * dt_b + d * dt_d + node * dt_n, read, bias, smallest, largest, SOFTPLUS, ACC)
    # [B, N, D] in memory, the layout of the projections.
    tl.store(step_out + (row * nodes + node) * width + d, step, mask=in_width)
    c = tl.load(C + row * C_b + s * C_s + node * C_n, mask=in_states, other=0.0).to(ACC)
    out = tl.sum(at * c[None, :], axis=1)
    if HAS_D:
        own = tl.load(x + row * x_b + d * x_d + node * x_n, mask=read, other=0.0).to(ACC)
        out += tl.load(D + d * D_d, mask=in_width, other=0.0).to(ACC) * own
    if HAS_Z:
        out *= silu(tl.load(z + row * z_b + d * z_d + node * z_n, mask=read, other=0.0).to(ACC))
    # C of a padding node was read, and may hold anything.
    out = tl.where(read, out, 0.0)
    tl.store(y + (row * nodes + node) * width + d, out.to(y.dtype.element_ty), mask=in_width)


@triton.jit
def tree_selective_advance_kernel(
    x, dt, A, B, seen, depth, last, state, new,
    x_b, x_d, x_n, dt_b, dt_d, dt_n, A_d, A_s, B_b, B_s, B_n, seen_b, depth_b, state_b, state_d, state_s,
    width, states, steps, ACC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The committed state of one block of channels; grid (channel blocks, B)."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    in_width, in_states = d < width, s < states
    inside = in_width[:, None] & in_states[None, :]
    a = tl.load(A + d[:, None] * A_d + s[None, :] * A_s, mask=inside, other=0.0).to(ACC)
    places = state + row * state_b + d[:, None] * state_d + s[None, :] * state_s
    at = tl.load(places, mask=inside, other=0.0).to(ACC)
    accepted = tl.load(last + row)
    node = tl.maximum(accepted, 0)
    deepest = tl.where(accepted < 0, -1, tl.load(depth + row * depth_b + node))
    seen += row * seen_b + node * steps
    for above in range(0, deepest + 1):
        ancestor = tl.load(seen + (deepest - above))
        step = tl.load(dt + row * dt_b + d * dt_d + ancestor * dt_n, mask=in_width, other=0.0).to(ACC)
        own = tl.load(x + row * x_b + d * x_d + ancestor * x_n, mask=in_width, other=0.0).to(ACC)
        b = tl.load(B + row * B_b + s * B_s + ancestor * B_n, mask=in_states, other=0.0).to(ACC)
        at = tl.exp(step[:, None] * a) * at + (step * own)[:, None] * b[None, :]
    places = new + (row * width + d[:, None]) * states + s[None, :]
    tl.store(places, at.to(new.dtype.element_ty), mask=inside)


def _blocks(width: int, states: int) -> dict[str, int]:
    BLOCK_S = triton.next_power_of_2(states)
    return {"BLOCK_S": BLOCK_S, "BLOCK_D": min(triton.next_power_of_2(width), max(16, 1024 // BLOCK_S))}


def tree_selective(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    tables: TreeTables,
    initial_state: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    valid: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y in the dtype of x and the processed time step in `dtype`, both [B, D, N] with the channels together."""
    batch, width, nodes = x.shape
    states = A.shape[1]
    y = torch.empty(batch, nodes, width, dtype=x.dtype, device=x.device)
    step = torch.empty(batch, nodes, width, dtype=dtype, device=x.device)
    blocks = _blocks(width, states)
    launch(
        tree_selective_kernel,
        (triton.cdiv(width, blocks["BLOCK_D"]), nodes, batch),
        x,
        **{"x": x, "dt": dt, "A": A, "B": B, "C": C, "state": initial_state},
        **{"D": x if D is None else D, "z": x if z is None else z, "dt_bias": x if dt_bias is None else dt_bias},
        **{"valid": x if valid is None else valid, "y": y, "step_out": step},
        **path_arguments(tables),
        **strides("x", x, "bdn"),
        **strides("dt", dt, "bdn"),
        **strides("A", A, "ds"),
        **strides("B", B, "bsn"),
        **strides("C", C, "bsn"),
        **strides("state", initial_state, "bds"),
        **strides("D", D, "d"),
        **strides("z", z, "bdn"),
        **strides("dt_bias", dt_bias, "d"),
        **strides("valid", valid, "bn"),
        **{"nodes": nodes, "width": width, "states": states, "smallest": 0.0, "largest": float("inf")},
        **{"HAS_D": D is not None, "HAS_Z": z is not None, "HAS_BIAS": dt_bias is not None},
        **{"HAS_VALID": valid is not None, "SOFTPLUS": dt_softplus, "ACC": accumulator(dtype), "num_warps": 4},
        **blocks,
    )
    return y.transpose(1, 2), step.transpose(1, 2)


def advance(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, state: Tensor, tables: TreeTables, nodes: Tensor, dtype: torch.dtype
) -> Tensor:
    """The state after `nodes` are accepted, in the dtype of `state`."""
    batch, width, _ = x.shape
    states = A.shape[1]
    new = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    blocks = _blocks(width, states)
    launch(
        tree_selective_advance_kernel,
        (triton.cdiv(width, blocks["BLOCK_D"]), batch),
        x,
        **{"x": x, "dt": dt, "A": A, "B": B, "last": nodes.contiguous(), "state": state, "new": new},
        **path_arguments(tables),
        **strides("x", x, "bdn"),
        **strides("dt", dt, "bdn"),
        **strides("A", A, "ds"),
        **strides("B", B, "bsn"),
        **strides("state", state, "bds"),
        **{"width": width, "states": states, "ACC": accumulator(dtype), "num_warps": 4},
        **blocks,
    )
    return new
