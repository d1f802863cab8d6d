"""Triton kernels of the Mamba-2 tree scan: one launch for the outputs, one for the replay. Unproven on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.tables import TreeTables
from draftwood.kernels.triton_common import (
    MOST_NODES,
    accumulator,
    block,
    launch,
    native_dot,
    path_arguments,
    silu,
    strides,
    time_steps,
)


@triton.jit
def _totals(rows, read, ancestors, dt, dt_n, valid, valid_n, a, bias, smallest, largest, nodes,
            HAS_VALID: tl.constexpr, SOFTPLUS: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Log decay from the root down to each of `rows`, in float64.

    Differences of float64 sums of float32 terms keep a segment that is tiny against the whole path.
    """
    total = tl.zeros([BLOCK_N], tl.float64)
    for first in range(0, nodes, BLOCK_N):
        above = first + tl.arange(0, BLOCK_N)
        here = above < nodes
        if HAS_VALID:
            here = here & (tl.load(valid + above * valid_n, mask=here, other=0) != 0)
        step = time_steps(dt + above * dt_n, here, bias, smallest, largest, SOFTPLUS, ACC)
        pairs = read[:, None] & here[None, :]
        on_path = tl.load(ancestors + rows[:, None] * nodes + above[None, :], mask=pairs, other=0) != 0
        total += tl.sum(tl.where(on_path, (step * a).to(tl.float64)[None, :], 0.0), axis=1)
    return total


@triton.jit
def tree_scan_kernel(
    x, dt, A, B, C, ancestors, state, D, z, dt_bias, valid, y, step_out,
    x_b, x_n, x_h, x_p, dt_b, dt_n, dt_h, A_h, B_b, B_n, B_g, B_s, C_b, C_n, C_g, C_s, ancestors_b,
    state_b, state_h, state_p, state_s, D_h, D_p, z_b, z_n, z_h, z_p, dt_bias_h, valid_b, valid_n,
    nodes, heads, width, states, repeats, smallest, largest,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr,
    SOFTPLUS: tl.constexpr, NATIVE_DOT: tl.constexpr, ACC: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """y of one block of nodes, one block of a head's width; grid (width blocks, node blocks, B * H)."""
    row_head = tl.program_id(2).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    group = head // repeats
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_tree = rows < nodes
    read = in_tree
    valid += row * valid_b
    if HAS_VALID:
        read = read & (tl.load(valid + rows * valid_n, mask=read, other=0) != 0)
    columns = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_width = columns < width

    ancestors += row * ancestors_b
    dt += row * dt_b + head * dt_h
    x += row * x_b + head * x_h
    B += row * B_b + group * B_g
    C += row * C_b + group * C_g
    state += row * state_b + head * state_h
    a = tl.load(A + head * A_h).to(ACC)
    bias = tl.load(dt_bias + head * dt_bias_h).to(ACC) if HAS_BIAS else 0.0
    total = _totals(rows, read, ancestors, dt, dt_n, valid, valid_n, a, bias, smallest, largest, nodes,
                    HAS_VALID, SOFTPLUS, ACC, BLOCK_N)  # fmt: skip
    step = time_steps(dt + rows * dt_n, read, bias, smallest, largest, SOFTPLUS, ACC)
    if tl.program_id(0) == 0:
        tl.store(step_out + (row * nodes + rows) * heads + head, step, mask=in_tree)

    out = tl.zeros([BLOCK_N, BLOCK_P], ACC)
    for first in range(0, states, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        c = tl.load(C + rows[:, None] * C_n + s[None, :] * C_s, mask=read[:, None] & (s < states)[None, :], other=0.0)
        places = state + columns[None, :] * state_p + s[:, None] * state_s
        carried = tl.load(places, mask=(s < states)[:, None] & in_width[None, :], other=0.0)
        out += tl.dot(c.to(ACC), carried.to(ACC), input_precision="ieee", out_dtype=ACC)
    out *= tl.exp(total.to(ACC))[:, None]

    # Ancestors come before their nodes: no later block is needed.
    for block_above in range(0, tl.program_id(1) + 1):
        above = block_above * BLOCK_N + tl.arange(0, BLOCK_N)
        here = above < nodes
        if HAS_VALID:
            here = here & (tl.load(valid + above * valid_n, mask=here, other=0) != 0)
        scores = tl.zeros([BLOCK_N, BLOCK_N], ACC)
        for first in range(0, states, BLOCK_S):
            s = first + tl.arange(0, BLOCK_S)
            in_states = s < states
            c = tl.load(C + rows[:, None] * C_n + s[None, :] * C_s, mask=read[:, None] & in_states[None, :], other=0.0)
            b = tl.load(B + above[None, :] * B_n + s[:, None] * B_s, mask=in_states[:, None] & here[None, :], other=0.0)
            if not NATIVE_DOT:
                c, b = c.to(ACC), b.to(ACC)
            # Products of 16-bit numbers are exact in the accumulator.
            scores += tl.dot(c, b, input_precision="ieee", out_dtype=ACC)
        total_above = _totals(above, here, ancestors, dt, dt_n, valid, valid_n, a, bias, smallest, largest, nodes,
                              HAS_VALID, SOFTPLUS, ACC, BLOCK_N)  # fmt: skip
        step_above = time_steps(dt + above * dt_n, here, bias, smallest, largest, SOFTPLUS, ACC)
        # Siblings give positive differences: limited before exp, and masked after it.
        between = tl.minimum(total[:, None] - total_above[None, :], 0.0).to(ACC)
        pairs = read[:, None] & here[None, :]
        on_path = tl.load(ancestors + rows[:, None] * nodes + above[None, :], mask=pairs, other=0) != 0
        weights = tl.where(on_path, scores * tl.exp(between) * step_above[None, :], 0.0)
        places = x + above[:, None] * x_n + columns[None, :] * x_p
        inputs = tl.load(places, mask=here[:, None] & in_width[None, :], other=0.0).to(ACC)
        out += tl.dot(weights, inputs, input_precision="ieee", out_dtype=ACC)

    written = in_tree[:, None] & in_width[None, :]
    seen = read[:, None] & in_width[None, :]
    if HAS_D:
        skip = tl.load(D + head * D_h + columns * D_p, mask=in_width, other=0.0).to(ACC)
        own = tl.load(x + rows[:, None] * x_n + columns[None, :] * x_p, mask=seen, other=0.0).to(ACC)
        out += skip[None, :] * own
    if HAS_Z:
        places = z + row * z_b + head * z_h + rows[:, None] * z_n + columns[None, :] * z_p
        out *= silu(tl.load(places, mask=seen, other=0.0).to(ACC))
    places = y + ((row * nodes + rows[:, None]) * heads + head) * width + columns[None, :]
    tl.store(places, out.to(y.dtype.element_ty), mask=written)


@triton.jit
def tree_scan_advance_kernel(
    x, B, dt, A, seen, depth, last, state, new,
    x_b, x_n, x_h, x_p, B_b, B_n, B_g, B_s, dt_b, dt_n, dt_h, A_h, seen_b, depth_b,
    state_b, state_h, state_p, state_s, heads, width, states, repeats, steps,
    ACC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The committed state of one head, one block of its width and states; grid (width, states, B * H).

    The recurrence from the root down: an accepted path is short, and its steps need no products of blocks.
    """
    row_head = tl.program_id(2).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    columns = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    in_width, in_states = columns < width, s < states
    inside = in_width[:, None] & in_states[None, :]
    dt += row * dt_b + head * dt_h
    x += row * x_b + head * x_h
    B += row * B_b + (head // repeats) * B_g
    a = tl.load(A + head * A_h).to(ACC)
    places = state + row * state_b + head * state_h + columns[:, None] * state_p + s[None, :] * state_s
    at = tl.load(places, mask=inside, other=0.0).to(ACC)
    accepted = tl.load(last + row)
    node = tl.maximum(accepted, 0)
    deepest = tl.where(accepted < 0, -1, tl.load(depth + row * depth_b + node))
    seen += row * seen_b + node * steps
    for above in range(0, deepest + 1):
        ancestor = tl.load(seen + (deepest - above))
        step = tl.load(dt + ancestor * dt_n).to(ACC)
        inputs = tl.load(x + ancestor * x_n + columns * x_p, mask=in_width, other=0.0).to(ACC)
        keys = tl.load(B + ancestor * B_n + s * B_s, mask=in_states, other=0.0).to(ACC)
        at = tl.exp(step * a) * at + (step * inputs)[:, None] * keys[None, :]
    places = new + (row_head * width + columns[:, None]) * states + s[None, :]
    tl.store(places, at.to(new.dtype.element_ty), mask=inside)


def tree_scan(
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
    dt_limit: tuple[float, float],
    valid: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y in the dtype of x and the processed time step in `dtype`, the dtype of the accumulators."""
    batch, nodes, heads, width = x.shape
    groups, states = B.shape[2:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    step = torch.empty(dt.shape, dtype=dtype, device=x.device)
    BLOCK_N = block(nodes, MOST_NODES)
    BLOCK_P = block(width, 32)
    skip = D[:, None] if D is not None and D.ndim == 1 else D
    launch(
        tree_scan_kernel,
        (triton.cdiv(width, BLOCK_P), triton.cdiv(nodes, BLOCK_N), batch * heads),
        x,
        **{"x": x, "dt": dt, "A": A, "B": B, "C": C, "ancestors": tables.ancestors, "state": initial_state},
        **{"D": x if D is None else D, "z": x if z is None else z, "dt_bias": x if dt_bias is None else dt_bias},
        **{"valid": x if valid is None else valid, "y": y, "step_out": step},
        **strides("x", x, "bnhp"),
        **strides("dt", dt, "bnh"),
        **strides("A", A, "h"),
        **strides("B", B, "bngs"),
        **strides("C", C, "bngs"),
        **{"ancestors_b": 0 if tables.num_rows == 1 else nodes * nodes},
        **strides("state", initial_state, "bhps"),
        **strides("D", skip, "hp"),
        **strides("z", z, "bnhp"),
        **strides("dt_bias", dt_bias, "h"),
        **strides("valid", valid, "bn"),
        **{"nodes": nodes, "heads": heads, "width": width, "states": states, "repeats": heads // groups},
        **{"smallest": dt_limit[0], "largest": dt_limit[1]},
        **{"HAS_D": D is not None, "HAS_Z": z is not None, "HAS_BIAS": dt_bias is not None},
        **{"HAS_VALID": valid is not None, "SOFTPLUS": dt_softplus},
        **{"NATIVE_DOT": native_dot(C, B), "ACC": accumulator(dtype)},
        **{"BLOCK_N": BLOCK_N, "BLOCK_P": BLOCK_P, "BLOCK_S": block(states, 64), "num_warps": 8 if BLOCK_N > 32 else 4},
    )
    return y, step


def advance(
    x: Tensor, B: Tensor, dt: Tensor, A: Tensor, state: Tensor, tables: TreeTables, nodes: Tensor, dtype: torch.dtype
) -> Tensor:
    """The state after `nodes` are accepted, in the dtype of `state`."""
    batch, _, heads, width = x.shape
    groups, states = B.shape[2:]
    new = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    BLOCK_P, BLOCK_S = block(width, 64), block(states, 64)
    launch(
        tree_scan_advance_kernel,
        (triton.cdiv(width, BLOCK_P), triton.cdiv(states, BLOCK_S), batch * heads),
        x,
        **{"x": x, "B": B, "dt": dt, "A": A, "last": nodes.contiguous(), "state": state, "new": new},
        **path_arguments(tables),
        **strides("x", x, "bnhp"),
        **strides("B", B, "bngs"),
        **strides("dt", dt, "bnh"),
        **strides("A", A, "h"),
        **strides("state", state, "bhps"),
        **{"heads": heads, "width": width, "states": states, "repeats": heads // groups},
        **{"ACC": accumulator(dtype), "BLOCK_P": BLOCK_P, "BLOCK_S": BLOCK_S, "num_warps": 4},
    )
    return new
