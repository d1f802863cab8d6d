"""Triton kernels of tree attention: parts of the keys in parallel, then their merge. Unproven on a GPU.

The prefix is read once and stays where it is: the query heads that share a key head are rows of one block, and the
tree's own keys are one more part instead of an appended copy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.tables import TreeTables
from draftwood.kernels.triton_common import accumulator, block, launch, native_dot, strides

# Programs that keep a large GPU busy; more parts of the prefix only add to the merge.
ENOUGH_PROGRAMS = 256
LEAST_PART = 128


@triton.jit
def _online_softmax(
    queries, keys, values, sees, scale, largest, weight, out, NATIVE_DOT: tl.constexpr, ACC: tl.constexpr
):
    """One block of keys: the running maximum, sum of weights, and weighted values of each row."""
    if not NATIVE_DOT:
        queries, keys, values = queries.to(ACC), keys.to(ACC), values.to(ACC)
    scores = tl.dot(queries, keys, input_precision="ieee", out_dtype=ACC) * scale
    scores = tl.where(sees, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen no key yet: -inf - (-inf) would be NaN.
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    shrink = tl.exp(largest - base)
    weights = tl.exp(scores - base[:, None])
    weight = weight * shrink + tl.sum(weights, axis=1)
    weighted = tl.dot(weights.to(values.dtype), values, input_precision="ieee", out_dtype=ACC)
    return new_largest, weight, out * shrink[:, None] + weighted


@triton.jit
def tree_attention_part_kernel(
    q, k_prefix, v_prefix, k_tree, v_tree, lengths, ancestors, valid, part_largest, part_weight, part_out,
    q_b, q_h, q_n, q_d, kp_b, kp_h, kp_l, kp_d, vp_b, vp_h, vp_l, vp_d, kt_b, kt_h, kt_n, kt_d, vt_b, vt_h, vt_n, vt_d,
    lengths_b, ancestors_b, valid_b, valid_n, nodes, kv_heads, repeats, width, value_width, part, parts, scale,
    HAS_VALID: tl.constexpr, NATIVE_DOT: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One part of the keys for the queries of one key head; grid (parts, query blocks, B * Hkv), the last the tree."""
    row_head = tl.program_id(2).to(tl.int64)
    row, head = row_head // kv_heads, row_head % kv_heads
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    node, repeat = m % nodes, m // nodes
    in_rows = m < nodes * repeats
    read = in_rows
    valid += row * valid_b
    if HAS_VALID:
        read = read & (tl.load(valid + node * valid_n, mask=read, other=0) != 0)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    in_width, in_values = d < width, e < value_width
    q += row * q_b + head * repeats * q_h
    queries = tl.load(
        q + repeat[:, None] * q_h + node[:, None] * q_n + d[None, :] * q_d,
        mask=read[:, None] & in_width[None, :],
        other=0.0,
    )

    largest = tl.full([BLOCK_M], float("-inf"), ACC)
    weight = tl.zeros([BLOCK_M], ACC)
    out = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    index = tl.program_id(0)
    if index < parts - 1:
        end = tl.minimum(tl.load(lengths + row * lengths_b), (index + 1) * part)
        k_prefix += row * kp_b + head * kp_h
        v_prefix += row * vp_b + head * vp_h
        for first in range(index * part, end, BLOCK_L):
            column = (first + tl.arange(0, BLOCK_L)).to(tl.int64)
            here = column < end
            key_places = k_prefix + column[None, :] * kp_l + d[:, None] * kp_d
            keys = tl.load(key_places, mask=in_width[:, None] & here[None, :], other=0.0)
            value_places = v_prefix + column[:, None] * vp_l + e[None, :] * vp_d
            values = tl.load(value_places, mask=here[:, None] & in_values[None, :], other=0.0)
            sees = read[:, None] & here[None, :]
            largest, weight, out = _online_softmax(
                queries, keys, values, sees, scale, largest, weight, out, NATIVE_DOT, ACC
            )
    else:
        k_tree += row * kt_b + head * kt_h
        v_tree += row * vt_b + head * vt_h
        ancestors += row * ancestors_b
        for first_node in range(0, nodes, BLOCK_L):
            column = (first_node + tl.arange(0, BLOCK_L)).to(tl.int64)
            here = column < nodes
            if HAS_VALID:
                here = here & (tl.load(valid + column * valid_n, mask=here, other=0) != 0)
            keys = tl.load(
                k_tree + column[None, :] * kt_n + d[:, None] * kt_d, mask=in_width[:, None] & here[None, :], other=0.0
            )
            values = tl.load(
                v_tree + column[:, None] * vt_n + e[None, :] * vt_d, mask=here[:, None] & in_values[None, :], other=0.0
            )
            pairs = read[:, None] & here[None, :]
            sees = tl.load(ancestors + node[:, None] * nodes + column[None, :], mask=pairs, other=0) != 0
            largest, weight, out = _online_softmax(
                queries, keys, values, sees, scale, largest, weight, out, NATIVE_DOT, ACC
            )
    # [B * Hkv, parts, repeats * N]
    places = (row_head * parts + index) * (nodes * repeats) + m
    tl.store(part_largest + places, largest, mask=in_rows)
    tl.store(part_weight + places, weight, mask=in_rows)
    places = part_out + places[:, None] * value_width + e[None, :]
    tl.store(places, out, mask=in_rows[:, None] & in_values[None, :])


@triton.jit
def tree_attention_merge_kernel(
    part_largest, part_weight, part_out, o, queries, value_width, parts,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """o [B, Hq, N, Dv] from the parts; grid (query blocks, B * Hkv)."""
    row_head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_V)
    in_rows, in_values = m < queries, e < value_width
    largest = tl.full([BLOCK_M], float("-inf"), ACC)
    weight = tl.zeros([BLOCK_M], ACC)
    out = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    for index in range(0, parts):
        places = (row_head * parts + index) * queries + m
        here = tl.load(part_largest + places, mask=in_rows, other=float("-inf"))
        new_largest = tl.maximum(largest, here)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink, share = tl.exp(largest - base), tl.exp(here - base)
        weight = weight * shrink + tl.load(part_weight + places, mask=in_rows, other=0.0) * share
        places = part_out + places[:, None] * value_width + e[None, :]
        values = tl.load(places, mask=in_rows[:, None] & in_values[None, :], other=0.0)
        out = out * shrink[:, None] + values * share[:, None]
        largest = new_largest
    # A padding node has seen nothing.
    out = out / tl.where(weight == 0.0, 1.0, weight)[:, None]
    places = o + (row_head * queries + m[:, None]) * value_width + e[None, :]
    tl.store(places, out.to(o.dtype.element_ty), mask=in_rows[:, None] & in_values[None, :])


def tree_attention(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_tree: Tensor,
    v_tree: Tensor,
    lengths: Tensor,
    tables: TreeTables,
    scale: float,
    valid: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """o [B, Hq, N, Dv] in the dtype of q."""
    batch, heads, nodes, width = q.shape
    kv_heads, columns, value_width = v_prefix.shape[1:]
    repeats = heads // kv_heads
    queries = repeats * nodes
    BLOCK_M = block(queries, 64)
    BLOCK_V = block(value_width)
    programs = batch * kv_heads * triton.cdiv(queries, BLOCK_M)
    prefix_parts = min(triton.cdiv(columns, LEAST_PART), max(1, ENOUGH_PROGRAMS // programs))
    part = triton.cdiv(triton.cdiv(columns, max(1, prefix_parts)), 64) * 64
    parts = prefix_parts + 1
    largest, weight = (torch.empty(batch * kv_heads, parts, queries, dtype=dtype, device=q.device) for _ in range(2))
    out = torch.empty(batch * kv_heads, parts, queries, value_width, dtype=dtype, device=q.device)
    o = torch.empty(batch, heads, nodes, value_width, dtype=q.dtype, device=q.device)
    native = all(native_dot(q, other) for other in (k_prefix, v_prefix, k_tree, v_tree))
    launch(
        tree_attention_part_kernel,
        (parts, triton.cdiv(queries, BLOCK_M), batch * kv_heads),
        q,
        **{"q": q, "k_prefix": k_prefix, "v_prefix": v_prefix, "k_tree": k_tree, "v_tree": v_tree},
        **{"lengths": lengths, "ancestors": tables.ancestors, "valid": q if valid is None else valid},
        **{"part_largest": largest, "part_weight": weight, "part_out": out},
        **strides("q", q, "bhnd"),
        **strides("kp", k_prefix, "bhld"),
        **strides("vp", v_prefix, "bhld"),
        **strides("kt", k_tree, "bhnd"),
        **strides("vt", v_tree, "bhnd"),
        **strides("lengths", lengths, "b"),
        **{"ancestors_b": 0 if tables.num_rows == 1 else nodes * nodes},
        **strides("valid", valid, "bn"),
        **{"nodes": nodes, "kv_heads": kv_heads, "repeats": repeats, "width": width, "value_width": value_width},
        **{"part": part, "parts": parts, "scale": scale, "HAS_VALID": valid is not None, "NATIVE_DOT": native},
        **{"ACC": accumulator(dtype), "BLOCK_M": BLOCK_M, "BLOCK_L": 32, "BLOCK_D": block(width), "BLOCK_V": BLOCK_V},
        **{"num_warps": 8 if BLOCK_M > 32 else 4, "num_stages": 2},
    )
    launch(
        tree_attention_merge_kernel,
        (triton.cdiv(queries, 16), batch * kv_heads),
        q,
        **{"part_largest": largest, "part_weight": weight, "part_out": out, "o": o},
        **{"queries": queries, "value_width": value_width, "parts": parts},
        **{"ACC": accumulator(dtype), "BLOCK_M": 16, "BLOCK_V": BLOCK_V, "num_warps": 4},
    )
    return o
