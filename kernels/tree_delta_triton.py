"""Triton kernels of the gated delta rule over trees: outputs with u, and the replay. Unproven on a GPU.

q and k come normalised, with the log decays summed along the paths in float64: differences of these sums keep a segment
that is tiny against the whole path. The triangular system is solved level by level, each level from those above it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.tables import TreeTables
from draftwood.kernels.triton_common import MOST_NODES, accumulator, block, launch, path_arguments, strides


@triton.jit
def _pair_scores(
    q, k, q_n, q_k, k_n, k_k, total, total_n, total_k, rows, above, in_rows, in_above, key_width,
    PER_CHANNEL: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(k_i . k_j) and (q_i . k_j) with the decay between the nodes, for two blocks of nodes."""
    from_keys = tl.zeros([BLOCK_N, BLOCK_N], ACC)
    from_queries = tl.zeros([BLOCK_N, BLOCK_N], ACC)
    if PER_CHANNEL:
        for channel in range(0, key_width):
            ki = tl.load(k + rows * k_n + channel * k_k, mask=in_rows, other=0.0).to(ACC)
            qi = tl.load(q + rows * q_n + channel * q_k, mask=in_rows, other=0.0).to(ACC)
            kj = tl.load(k + above * k_n + channel * k_k, mask=in_above, other=0.0).to(ACC)
            ti = tl.load(total + rows * total_n + channel * total_k, mask=in_rows, other=0.0)
            tj = tl.load(total + above * total_n + channel * total_k, mask=in_above, other=0.0)
            decayed = tl.exp(tl.minimum(ti[:, None] - tj[None, :], 0.0).to(ACC)) * kj[None, :]
            from_keys += ki[:, None] * decayed
            from_queries += qi[:, None] * decayed
    else:
        for first in range(0, key_width, BLOCK_K):
            c = first + tl.arange(0, BLOCK_K)
            left = in_rows[:, None] & (c < key_width)[None, :]
            right = (c < key_width)[:, None] & in_above[None, :]
            ki = tl.load(k + rows[:, None] * k_n + c[None, :] * k_k, mask=left, other=0.0).to(ACC)
            qi = tl.load(q + rows[:, None] * q_n + c[None, :] * q_k, mask=left, other=0.0).to(ACC)
            kj = tl.load(k + above[None, :] * k_n + c[:, None] * k_k, mask=right, other=0.0).to(ACC)
            from_keys += tl.dot(ki, kj, input_precision="ieee", out_dtype=ACC)
            from_queries += tl.dot(qi, kj, input_precision="ieee", out_dtype=ACC)
        ti = tl.load(total + rows * total_n, mask=in_rows, other=0.0)
        tj = tl.load(total + above * total_n, mask=in_above, other=0.0)
        decay = tl.exp(tl.minimum(ti[:, None] - tj[None, :], 0.0).to(ACC))
        from_keys *= decay
        from_queries *= decay
    return from_keys, from_queries


@triton.jit
def tree_delta_kernel(
    q, k, v, beta, total, ancestors, depth, state, o, u,
    q_b, q_n, q_h, q_k, k_b, k_n, k_h, k_k, v_b, v_n, v_h, v_v, beta_b, beta_n, beta_h,
    total_b, total_n, total_h, total_k, ancestors_b, depth_b, state_b, state_h, state_k, state_v,
    nodes, heads, repeats, key_width, width, levels, scale,
    PER_CHANNEL: tl.constexpr, ACC: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """o and u [B, N, H, Dv] of all nodes, one block of a head's values; grid (value blocks, B * H)."""
    row_head = tl.program_id(1).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_width = columns < width
    q += row * q_b + (head // repeats) * q_h
    k += row * k_b + (head // repeats) * k_h
    v += row * v_b + head * v_h
    beta += row * beta_b + head * beta_h
    total += row * total_b + head * total_h
    state += row * state_b + head * state_h
    ancestors += row * ancestors_b
    depth += row * depth_b
    for block_rows in range(0, tl.cdiv(nodes, BLOCK_N)):
        rows = block_rows * BLOCK_N + tl.arange(0, BLOCK_N)
        in_rows = rows < nodes
        strength = tl.load(beta + rows * beta_n, mask=in_rows, other=0.0).to(ACC)
        carried_keys = tl.zeros([BLOCK_N, BLOCK_V], ACC)
        out = tl.zeros([BLOCK_N, BLOCK_V], ACC)
        for first in range(0, key_width, BLOCK_K):
            c = first + tl.arange(0, BLOCK_K)
            in_keys = in_rows[:, None] & (c < key_width)[None, :]
            ki = tl.load(k + rows[:, None] * k_n + c[None, :] * k_k, mask=in_keys, other=0.0).to(ACC)
            qi = tl.load(q + rows[:, None] * q_n + c[None, :] * q_k, mask=in_keys, other=0.0).to(ACC)
            decay = tl.load(total + rows[:, None] * total_n + c[None, :] * total_k, mask=in_keys, other=0.0).to(ACC)
            decay = tl.exp(decay)
            places = state + c[:, None] * state_k + columns[None, :] * state_v
            carried = tl.load(places, mask=(c < key_width)[:, None] & in_width[None, :], other=0.0).to(ACC)
            carried_keys += tl.dot(ki * decay, carried, input_precision="ieee", out_dtype=ACC)
            out += tl.dot(qi * decay, carried, input_precision="ieee", out_dtype=ACC)
        inside = in_rows[:, None] & in_width[None, :]
        values = tl.load(v + rows[:, None] * v_n + columns[None, :] * v_v, mask=inside, other=0.0).to(ACC)
        right = values - carried_keys

        # Blocks above are solved: they are read back from memory.
        for block_above in range(0, block_rows):
            above = block_above * BLOCK_N + tl.arange(0, BLOCK_N)
            in_above = above < nodes
            from_keys, from_queries = _pair_scores(
                q, k, q_n, q_k, k_n, k_k, total, total_n, total_k, rows, above, in_rows, in_above, key_width,
                PER_CHANNEL, ACC, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            pairs = in_rows[:, None] & in_above[None, :]
            on_path = tl.load(ancestors + rows[:, None] * nodes + above[None, :], mask=pairs, other=0) != 0
            places = u + ((row * nodes + above[:, None]) * heads + head) * width + columns[None, :]
            solved = tl.load(places, mask=in_above[:, None] & in_width[None, :], other=0.0)
            right -= tl.dot(tl.where(on_path, from_keys, 0.0), solved, input_precision="ieee", out_dtype=ACC)
            out += tl.dot(tl.where(on_path, from_queries, 0.0), solved, input_precision="ieee", out_dtype=ACC)

        from_keys, from_queries = _pair_scores(
            q, k, q_n, q_k, k_n, k_k, total, total_n, total_k, rows, rows, in_rows, in_rows, key_width,
            PER_CHANNEL, ACC, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        pairs = in_rows[:, None] & in_rows[None, :]
        on_path = tl.load(ancestors + rows[:, None] * nodes + rows[None, :], mask=pairs, other=0) != 0
        # A node's own row is 0 until its level is solved: the diagonal adds nothing.
        system = tl.where(on_path, from_keys, 0.0)
        level = tl.load(depth + rows, mask=in_rows, other=-1)
        solved = tl.zeros([BLOCK_N, BLOCK_V], ACC)
        for current in range(0, levels):
            known = tl.dot(system, solved, input_precision="ieee", out_dtype=ACC)
            solved = tl.where((level == current)[:, None], strength[:, None] * (right - known), solved)
        out += tl.dot(tl.where(on_path, from_queries, 0.0), solved, input_precision="ieee", out_dtype=ACC)
        places = ((row * nodes + rows[:, None]) * heads + head) * width + columns[None, :]
        tl.store(u + places, solved, mask=inside)
        tl.store(o + places, (scale * out).to(o.dtype.element_ty), mask=inside)
        tl.debug_barrier()


@triton.jit
def tree_delta_advance_kernel(
    k, u, g, seen, depth, last, state, new,
    k_b, k_n, k_h, k_k, u_b, u_n, u_h, u_v, g_b, g_n, g_h, g_k, seen_b, depth_b,
    state_b, state_h, state_k, state_v, heads, repeats, key_width, width, steps,
    ACC: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The committed state of one head, one block of keys and values; grid (key blocks, value blocks, B * H).

    The recurrence from the root down: an accepted path is short, and its steps need no products of blocks.
    """
    row_head = tl.program_id(2).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    c = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_keys, in_width = c < key_width, columns < width
    inside = in_keys[:, None] & in_width[None, :]
    k += row * k_b + (head // repeats) * k_h
    u += row * u_b + head * u_h
    g += row * g_b + head * g_h
    places = state + row * state_b + head * state_h + c[:, None] * state_k + columns[None, :] * state_v
    at = tl.load(places, mask=inside, other=0.0).to(ACC)
    accepted = tl.load(last + row)
    node = tl.maximum(accepted, 0)
    deepest = tl.where(accepted < 0, -1, tl.load(depth + row * depth_b + node))
    seen += row * seen_b + node * steps
    for above in range(0, deepest + 1):
        ancestor = tl.load(seen + (deepest - above))
        decay = tl.exp(tl.load(g + ancestor * g_n + c * g_k, mask=in_keys, other=0.0).to(ACC))
        key = tl.load(k + ancestor * k_n + c * k_k, mask=in_keys, other=0.0).to(ACC)
        written = tl.load(u + ancestor * u_n + columns * u_v, mask=in_width, other=0.0).to(ACC)
        at = decay[:, None] * at + key[:, None] * written[None, :]
    places = new + (row_head * key_width + c[:, None]) * width + columns[None, :]
    tl.store(places, at.to(new.dtype.element_ty), mask=inside)


def _per_channel(g: Tensor) -> Tensor:
    """[B, N, H, Dk]; a decay per head is the same in every channel, with stride 0."""
    return g.unsqueeze(-1) if g.ndim == 3 else g


def tree_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tables: TreeTables, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """o and u, [B, N, H, Dv] in the dtype of v."""
    batch, nodes, heads, width = v.shape
    key_heads, key_width = k.shape[2:]
    total = tables.path_values(g.double())
    o, u = (torch.empty(v.shape, dtype=v.dtype, device=v.device) for _ in range(2))
    # A decay per channel takes its scores one channel at a time, in registers: fewer pairs fit.
    BLOCK_N = block(nodes, MOST_NODES if g.ndim == 3 else MOST_NODES // 2)
    BLOCK_V = block(width, 32)
    launch(
        tree_delta_kernel,
        (triton.cdiv(width, BLOCK_V), batch * heads),
        v,
        **{"q": q, "k": k, "v": v, "beta": beta, "total": total, "state": initial_state, "o": o, "u": u},
        **{"ancestors": tables.ancestors, "ancestors_b": 0 if tables.num_rows == 1 else nodes * nodes},
        **{"depth": tables.depth, "depth_b": 0 if tables.num_rows == 1 else nodes},
        **strides("q", q, "bnhk"),
        **strides("k", k, "bnhk"),
        **strides("v", v, "bnhv"),
        **strides("beta", beta, "bnh"),
        **strides("total", _per_channel(total), "bnhk"),
        **strides("state", initial_state, "bhkv"),
        **{"nodes": nodes, "heads": heads, "repeats": heads // key_heads, "key_width": key_width, "width": width},
        **{"levels": tables.max_depth + 1, "scale": scale, "PER_CHANNEL": g.ndim == 4, "ACC": accumulator(v.dtype)},
        **{"BLOCK_N": BLOCK_N, "BLOCK_K": block(key_width, 32), "BLOCK_V": BLOCK_V},
        # Pipelined loops would not leave room in shared memory.
        **{"num_warps": 8 if BLOCK_N > 32 else 4, "num_stages": 1},
    )
    return o, u


def advance(k: Tensor, u: Tensor, g: Tensor, state: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
    """The state after `nodes` are accepted, in the dtype of `state`."""
    batch, _, heads, width = u.shape
    key_heads, key_width = k.shape[2:]
    new = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    BLOCK_K, BLOCK_V = block(key_width, 64), block(width, 64)
    launch(
        tree_delta_advance_kernel,
        (triton.cdiv(key_width, BLOCK_K), triton.cdiv(width, BLOCK_V), batch * heads),
        u,
        **{"k": k, "u": u, "g": g, "last": nodes.contiguous(), "state": state, "new": new},
        **path_arguments(tables),
        **strides("k", k, "bnhk"),
        **strides("u", u, "bnhv"),
        **strides("g", _per_channel(g), "bnhk"),
        **strides("state", state, "bhkv"),
        **{"heads": heads, "repeats": heads // key_heads, "key_width": key_width, "width": width},
        **{"ACC": accumulator(u.dtype), "BLOCK_K": BLOCK_K, "BLOCK_V": BLOCK_V, "num_warps": 4},
    )
    return new
