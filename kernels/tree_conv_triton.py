"""Triton kernels of the tree convolution: outputs, and the committed window. Unproven on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.tables import TreeTables
from draftwood.kernels.triton_common import accumulator, launch, silu, strides


@triton.jit
def tree_conv_kernel(
    x, window, weight, bias, seen, valid, y,
    x_b, x_d, x_n, window_b, window_d, window_w, weight_d, weight_k, bias_d, seen_b, valid_b, valid_n,
    nodes, width, columns,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr, SILU: tl.constexpr,
    ACC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y [B, N, D]; grid (channel blocks, node blocks, B). `seen` holds the look-back table of the tree."""
    row = tl.program_id(2).to(tl.int64)
    node = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_tree, in_width = node < nodes, d < width
    read = in_tree
    if HAS_VALID:
        read = read & (tl.load(valid + row * valid_b + node * valid_n, mask=read, other=0) != 0)
    out = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    for distance in tl.static_range(TAPS):
        place = tl.load(seen + row * seen_b + node * TAPS + distance, mask=read, other=0)
        in_nodes = (read & (place >= 0))[:, None] & in_width[None, :]
        in_window = (read & (place < 0))[:, None] & in_width[None, :]
        own = tl.load(x + row * x_b + place[:, None] * x_n + d[None, :] * x_d, mask=in_nodes, other=0.0)
        places = window + row * window_b + (columns + place)[:, None] * window_w + d[None, :] * window_d
        committed = tl.load(places, mask=in_window, other=0.0)
        tap = tl.load(weight + d * weight_d + (TAPS - 1 - distance) * weight_k, mask=in_width, other=0.0).to(ACC)
        out += (own.to(ACC) + committed.to(ACC)) * tap[None, :]
    if HAS_BIAS:
        out += tl.load(bias + d * bias_d, mask=in_width, other=0.0).to(ACC)[None, :]
    if SILU:
        out = silu(out)
    out = tl.where(read[:, None], out, 0.0)
    places = y + (row * nodes + node[:, None]) * width + d[None, :]
    tl.store(places, out.to(y.dtype.element_ty), mask=in_tree[:, None] & in_width[None, :])


@triton.jit
def tree_conv_commit_kernel(
    x, window, seen, last, new,
    x_b, x_d, x_n, window_b, window_d, window_w, seen_b, width, columns,
    BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The new window [B, D, W]; grid (channel blocks, B). `seen` holds the look-back table of W steps."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    in_width, in_window = d < width, w < columns
    accepted = tl.load(last + row)
    steps = seen + row * seen_b + tl.maximum(accepted, 0) * columns
    place = tl.load(steps + (columns - 1 - w), mask=in_window, other=0)
    # Nothing accepted: column w stays, that is, W - w before the root.
    place = tl.where(accepted + w * 0 < 0, w - columns, place)
    from_nodes = (in_window & (place >= 0))[None, :] & in_width[:, None]
    from_window = (in_window & (place < 0))[None, :] & in_width[:, None]
    own = tl.load(x + row * x_b + place[None, :] * x_n + d[:, None] * x_d, mask=from_nodes, other=0.0)
    places = window + row * window_b + (columns + place)[None, :] * window_w + d[:, None] * window_d
    committed = tl.load(places, mask=from_window, other=0.0)
    value = tl.where(from_nodes, own.to(new.dtype.element_ty), committed)
    places = new + (row * width + d[:, None]) * columns + w[None, :]
    tl.store(places, value, mask=in_width[:, None] & in_window[None, :])


def tree_conv(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    tables: TreeTables,
    bias: Tensor | None,
    activation: str | None,
    valid: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y [B, D, N] in the dtype of x, the channels together in memory."""
    batch, width, nodes = x.shape
    taps = weight.shape[1]
    y = torch.empty(batch, nodes, width, dtype=x.dtype, device=x.device)
    BLOCK_N, BLOCK_D = 8, min(128, triton.next_power_of_2(width))
    launch(
        tree_conv_kernel,
        (triton.cdiv(width, BLOCK_D), triton.cdiv(nodes, BLOCK_N), batch),
        x,
        **{"x": x, "window": window, "weight": weight, "bias": x if bias is None else bias},
        **{"seen": tables.lookback(taps), "valid": x if valid is None else valid, "y": y},
        **strides("x", x, "bdn"),
        **strides("window", window, "bdw"),
        **strides("weight", weight, "dk"),
        **strides("bias", bias, "d"),
        **{"seen_b": 0 if tables.num_rows == 1 else nodes * taps},
        **strides("valid", valid, "bn"),
        **{"nodes": nodes, "width": width, "columns": window.shape[2], "TAPS": taps},
        **{"HAS_BIAS": bias is not None, "HAS_VALID": valid is not None, "SILU": activation is not None},
        **{"ACC": accumulator(dtype), "BLOCK_N": BLOCK_N, "BLOCK_D": BLOCK_D, "num_warps": 4},
    )
    return y.transpose(1, 2)


def commit(window: Tensor, x: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
    """The window after `nodes` are accepted, [B, D, W]."""
    batch, width, columns = window.shape
    new = torch.empty(window.shape, dtype=window.dtype, device=window.device)
    BLOCK_D = min(128, triton.next_power_of_2(width))
    launch(
        tree_conv_commit_kernel,
        (triton.cdiv(width, BLOCK_D), batch),
        x,
        **{"x": x, "window": window, "seen": tables.lookback(columns), "last": nodes.contiguous(), "new": new},
        **strides("x", x, "bdn"),
        **strides("window", window, "bdw"),
        **{"seen_b": 0 if tables.num_rows == 1 else tables.num_nodes * columns, "width": width, "columns": columns},
        **{"BLOCK_W": triton.next_power_of_2(columns), "BLOCK_D": BLOCK_D, "num_warps": 4},
    )
    return new
