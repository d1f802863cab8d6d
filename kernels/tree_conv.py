"""Causal depthwise convolution along every path of a token tree.

A node sees its last K - 1 ancestors, and the tail of the committed window where its path is shorter.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.kernels import reference
from draftwood.kernels.checks import Shapes, blank
from draftwood.kernels.decay import accumulator_dtype
from draftwood.kernels.dispatch import implementation
from draftwood.kernels.tables import TreeTables

ACTIVATIONS = (None, "silu", "swish")


def tree_conv(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    tables: TreeTables,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """The convolution's output at all nodes of a tree, each as if its path followed the committed tokens.

    Args:
        x: [B, D, N] inputs of the nodes.
        window: [B, D, W] the last W committed inputs, oldest first, W at least K - 1.
        weight: [D, K], the last column for the node itself.
        bias: [D].
        activation: None, "silu" or its other name "swish".
        valid: [B, N] bool. Other nodes are padding: not read, output 0, no valid node descends from them.

    Returns:
        [B, D, N] in the dtype of x (a transposed view: the channels lie together in memory).

    Raises:
        ValueError: shapes that do not fit together, a window that is too short, an unknown activation.
    """
    shapes = Shapes("tree_conv", tables)
    shapes.check("x", x, "B D N")
    shapes.check("window", window, "B D W")
    shapes.check("weight", weight, "D K")
    shapes.check("bias", bias, "D")
    shapes.check("valid", valid, "B N")
    shapes.rows(tables)
    if window.shape[2] < weight.shape[1] - 1:
        raise ValueError(
            f"tree_conv: the window holds {window.shape[2]} committed columns, "
            f"{weight.shape[1]} taps need at least {weight.shape[1] - 1}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"tree_conv: activation {activation!r} is not one of {ACTIVATIONS}")
    match implementation(x):
        case "reference":
            return reference.tree_conv(x, window, weight, tables, bias, activation, valid)
        case "triton":
            from draftwood.kernels import tree_conv_triton

            dtype = accumulator_dtype(x)
            return tree_conv_triton.tree_conv(x, window, weight, tables, bias, activation, valid, dtype)
        case _:
            return _tree_conv_torch(x, window, weight, tables, bias, activation, valid)


def tree_conv_commit(window: Tensor, x: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
    """The committed window after the path from the root to `nodes` is accepted; `window` is left as it is.

    Args:
        window: [B, D, W] the last W committed inputs.
        x: [B, D, N] the inputs given to `tree_conv`.
        nodes: [B] int64, the last accepted node of each row; -1 keeps the row's window.

    Returns:
        [B, D, W] in the dtype of `window`.

    Raises:
        ValueError: shapes that do not fit together.
    """
    shapes = Shapes("tree_conv_commit", tables)
    shapes.check("window", window, "B D W")
    shapes.check("x", x, "B D N")
    shapes.check("nodes", nodes, "B")
    shapes.rows(tables)
    match implementation(x):
        case "reference":
            return reference.tree_conv_commit(window, x, tables, nodes)
        case "triton":
            from draftwood.kernels import tree_conv_triton

            return tree_conv_triton.commit(window, x, tables, nodes)
        case _:
            return _commit_torch(window, x, tables, nodes)


def _commit_torch(window: Tensor, x: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
    batch, width, columns = window.shape
    # Indices into [window | x]: `lookback` counts from the root, which is column W.
    table = tables.derived(("window", columns), lambda: tables.lookback(columns).flip(-1) + columns)
    rows = torch.arange(batch, device=x.device) if tables.num_rows > 1 else nodes.new_zeros(batch)
    index = table[rows, nodes.clamp(min=0)]  # [B, W]
    index = torch.where((nodes < 0)[:, None], torch.arange(columns, device=x.device), index)
    inputs = torch.cat([window, x.to(window.dtype)], dim=-1)
    return inputs.gather(2, index[:, None].expand(batch, width, columns))


def _tree_conv_torch(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    tables: TreeTables,
    bias: Tensor | None,
    activation: str | None,
    valid: Tensor | None,
) -> Tensor:
    batch, width, nodes = x.shape
    taps = weight.shape[1]
    dtype = accumulator_dtype(x)
    tail = window[..., window.shape[2] - (taps - 1) :]
    # Channels last: a gathered row is one run of memory.
    inputs = torch.cat([tail.transpose(1, 2).to(x.dtype), blank(x, valid, node_dim=2).transpose(1, 2)], dim=1)
    inputs = inputs.to(dtype).view(-1, width)

    def build() -> list[Tensor]:
        index = tables.lookback(taps) + (taps - 1)  # [rows, N, K] into [tail | nodes]
        first = torch.arange(batch, device=x.device)[:, None, None] * (taps - 1 + nodes)
        return [column.flatten().contiguous() for column in (index + first).unbind(-1)]

    by_distance = tables.derived(("conv", taps, batch), build)
    weight = weight.to(dtype).t().contiguous()
    y = inputs.index_select(0, by_distance[0]) * weight[-1]  # [B * N, D]
    for distance in range(1, taps):
        y = torch.addcmul(y, inputs.index_select(0, by_distance[distance]), weight[-1 - distance])
    if bias is not None:
        y = y + bias.to(dtype)
    if activation is not None:
        y = F.silu(y)
    return blank(y.to(x.dtype).view(batch, nodes, width), valid).transpose(1, 2)
