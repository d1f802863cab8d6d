"""Log decays along the paths of a tree, and the discretisation of the time step: shared by the recurrent operators."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.kernels.tables import TreeTables

NO_LIMIT = (0.0, math.inf)


def accumulator_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where a tensor is float64, float32 otherwise: the dtype of scores, decays and states."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def discretize(
    dt: Tensor,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Tensor:
    """The time step of the recurrence, clamp(softplus(dt + dt_bias), dt_limit), from the raw projection.

    The only definition in the project: prefill, single steps, trees and replay must not differ in it.

    Args:
        dt: raw time step, any shape.
        dt_bias: broadcastable to `dt`, or None.
        dt_limit: smallest and largest time step.

    Returns:
        shape of `dt`, float32 (float64 for float64 inputs).
    """
    dt = dt.to(accumulator_dtype(dt))
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
        if dt_limit == NO_LIMIT:
            return dt
    return dt.clamp(*dt_limit)


def segment_sums(log_decay: Tensor, tables: TreeTables) -> tuple[Tensor, Tensor]:
    """Log decay from every ancestor, and from the committed state, down to every node.

    Sums only the terms between the two nodes. The difference of two cumulative sums would lose a small segment
    behind a large one: in float32, 5e4 + 1e-3 - 5e4 is 0.

    Args:
        log_decay: [B, H, N] log of the decay that each node applies, float32 or float64, at most 0.

    Returns:
        between: [B, H, N, N], entry (i, j) sums over the path from below j down to i; 0 where j is no ancestor of i.
        total: [B, H, N], the sum from the root down to i.
    """
    dtype = log_decay.dtype

    def build() -> tuple[Tensor, Tensor]:
        ancestors = tables.ancestors.to(dtype)
        below = ancestors - torch.eye(tables.num_nodes, dtype=dtype, device=ancestors.device)
        # One tree for all rows: a plain matrix makes the product below a single GEMM.
        return ancestors[:, None], below[0] if tables.num_rows == 1 else below[:, None]

    ancestors, below = tables.derived(("segments", dtype), build)
    on_path = log_decay.unsqueeze(2) * ancestors  # [B, H, N, N]
    return on_path @ below, on_path.sum(-1)


def path_segment_sums(log_decay: Tensor, tables: TreeTables, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`segment_sums` for one node of each row; an empty path, of sums 0, for node -1.

    Args:
        log_decay: [B, N, ...].
        nodes: [B] int64.

    Returns:
        between: [B, N, ...] log decay from below j down to the row's node; 0 where j is not on its path.
        total: [B, ...] log decay from the root down to it.
        on_path: [B, N] 1 on the node and its ancestors, 0 elsewhere, in the dtype of `log_decay`.
    """
    batch, num_nodes = log_decay.shape[:2]
    dtype = log_decay.dtype

    def build() -> tuple[Tensor, Tensor]:
        ancestors = tables.ancestors.to(dtype)
        # Row -1 is the empty path.
        paths = torch.cat([ancestors, torch.zeros_like(ancestors[:, :1])], dim=1)
        below = ancestors.transpose(1, 2) - torch.eye(num_nodes, dtype=dtype, device=ancestors.device)
        # The row of ones makes the sum over the whole path.
        return paths, torch.cat([below, torch.ones_like(below[:, :1])], dim=1)

    paths, below = tables.derived(("paths", dtype), build)
    if tables.num_rows == 1:
        on_path = paths[0].index_select(0, nodes % (num_nodes + 1))
    else:
        on_path = paths[torch.arange(batch, device=nodes.device), nodes]
    flat = log_decay.reshape(batch, num_nodes, -1)
    sums = (below * on_path[:, None]) @ flat  # [B, N + 1, ...]
    sums = sums.view(batch, num_nodes + 1, *log_decay.shape[2:])
    return sums[:, :-1], sums[:, -1], on_path
