"""Mamba-2 (SSD, arXiv 2405.21060) over the nodes of a token tree, without a state per node.

Per head, with cs the sum of dt A along the path and S0 the committed state:

    y_i = exp(cs_i) S0 C_i + sum over ancestors j of i, i included, of (C_i . B_j) exp(cs_i - cs_j) dt_j x_j + D x_i
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.kernels import reference
from draftwood.kernels.checks import Shapes, blank
from draftwood.kernels.decay import NO_LIMIT, accumulator_dtype, discretize, path_segment_sums, segment_sums
from draftwood.kernels.dispatch import implementation
from draftwood.kernels.tables import TreeTables


@dataclass(frozen=True)
class TreeScanReplay:
    """What a tree scan leaves for the commit: the inputs of the nodes, no state.

    Attributes:
        x: [B, N, H, P].
        B: [B, N, G, S].
        dt: [B, N, H] float32 or float64, processed; 0 at invalid nodes.
        A: [H].
        valid: [B, N] bool, or None.
    """

    x: Tensor
    B: Tensor
    dt: Tensor
    A: Tensor
    valid: Tensor | None = None

    def to(self, *args: object, **kwargs: object) -> "TreeScanReplay":
        """Itself: transformers converts what a scan returns as its final state."""
        return self

    def advance(self, state: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
        """The state after the path from the root to `nodes` is accepted; `state` is left as it is.

        Args:
            state: [B, H, P, S] the state that the tree started from.
            nodes: [B] int64, the last accepted node of each row; -1 keeps the row's state.

        Returns:
            [B, H, P, S] in the dtype of `state`.

        Raises:
            ValueError: `state` or `nodes` has another shape.
        """
        shapes = Shapes("TreeScanReplay.advance", tables)
        shapes.check("x", self.x, "B N H P")
        shapes.check("B", self.B, "B N G S")
        shapes.check("state", state, "B H P S")
        shapes.check("nodes", nodes, "B")
        match implementation(self.x):
            case "reference":

                def step(row: int, node: int, at: Tensor) -> Tensor:
                    return reference.scan_step(at, self.x[row, node], self.dt[row, node], self.A, self.B[row, node])

                return reference.replay(tables, state, nodes, step)
            case "triton":
                from draftwood.kernels import tree_scan_triton

                dtype = accumulator_dtype(self.x, self.dt, state)
                return tree_scan_triton.advance(self.x, self.B, self.dt, self.A, state, tables, nodes, dtype)
            case _:
                return _advance_torch(self, state, tables, nodes)


def tree_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    tables: TreeTables,
    *,
    initial_state: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    valid: Tensor | None = None,
) -> tuple[Tensor, TreeScanReplay]:
    """Outputs of all nodes of a tree, each as if its path had been scanned after the committed tokens.

    Scores, decays and states are float32 whatever the inputs' dtype (float64 where one of x, dt, initial_state is).

    Args:
        x: [B, N, H, P].
        dt: [B, N, H] raw time step.
        A: [H], negative.
        B: [B, N, G, S], each group shared by H / G consecutive heads.
        C: [B, N, G, S].
        initial_state: [B, H, P, S] the committed state.
        D: [H] or [H, P] skip connection.
        z: [B, N, H, P], the output is multiplied by silu(z).
        dt_bias: [H].
        dt_softplus: whether softplus is applied to the time step.
        dt_limit: smallest and largest time step.
        valid: [B, N] bool. Other nodes are padding: their inputs are not read as numbers, their outputs are 0, and no
            valid node descends from them.

    Returns:
        y [B, N, H, P] in the dtype of x, and the replay that advances the state once a path is accepted.

    Raises:
        ValueError: shapes that do not fit together.
    """
    shapes = Shapes("tree_scan", tables)
    shapes.check("x", x, "B N H P")
    shapes.check("dt", dt, "B N H")
    shapes.check("A", A, "H")
    shapes.check("B", B, "B N G S")
    shapes.check("C", C, "B N G S")
    shapes.check("initial_state", initial_state, "B H P S")
    shapes.check("D", D, "H" if D is None or D.ndim == 1 else "H P")
    shapes.check("z", z, "B N H P")
    shapes.check("dt_bias", dt_bias, "H")
    shapes.check("valid", valid, "B N")
    shapes.divides("G", "H")
    shapes.rows(tables)

    match implementation(x):
        case "reference":
            step = blank(discretize(dt, dt_bias, dt_softplus, dt_limit), valid)
            y = reference.tree_scan(x, step, A, B, C, tables, initial_state, D, z, valid)
        case "triton":
            from draftwood.kernels import tree_scan_triton

            dtype = accumulator_dtype(x, dt, initial_state)
            y, step = tree_scan_triton.tree_scan(
                x, dt, A, B, C, tables, initial_state, D, z, dt_bias, dt_softplus, dt_limit, valid, dtype
            )
        case _:
            step = blank(discretize(dt, dt_bias, dt_softplus, dt_limit), valid)
            inputs = (blank(x, valid), step, A, blank(B, valid), blank(C, valid))
            y = _tree_scan_torch(*inputs, tables, initial_state, D, blank(z, valid))
    return y.to(x.dtype), TreeScanReplay(x, B, step, A, valid)


def _tree_scan_torch(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    tables: TreeTables,
    initial_state: Tensor,
    D: Tensor | None,
    z: Tensor | None,
) -> Tensor:
    batch, nodes, heads, width = x.shape
    groups, states = B.shape[2:]
    repeats = heads // groups
    dtype = accumulator_dtype(x, dt, initial_state)
    x, dt, B, C, initial_state = (tensor.to(dtype) for tensor in (x, dt, B, C, initial_state))

    dt = dt.transpose(1, 2).contiguous()
    between, total = segment_sums(dt * A.to(dtype)[:, None], tables)
    decay = between.exp() * dt.unsqueeze(2)  # [B, H, N, N]
    B = B.transpose(1, 2).reshape(-1, nodes, states)
    C = C.transpose(1, 2).reshape(-1, nodes, states)
    scores = (C @ B.transpose(1, 2)).view(batch, groups, nodes, nodes)
    scores = torch.where(tables.ancestors.unsqueeze(1), scores, 0.0)
    weights = (scores.unsqueeze(2) * decay.view(batch, groups, repeats, nodes, nodes)).view(-1, nodes, nodes)
    within = weights @ x.transpose(1, 2).reshape(-1, nodes, width)  # [B * H, N, P]

    # One product per group: its heads lie side by side as columns.
    columns = initial_state.reshape(-1, repeats * width, states).transpose(1, 2)
    carried = (C @ columns).view(batch, groups, nodes, repeats, width)
    y = carried.transpose(1, 2).reshape(batch, nodes, heads, width) * total.exp().transpose(1, 2).unsqueeze(-1)
    y += within.view(batch, heads, nodes, width).transpose(1, 2)
    if D is not None:
        y = torch.addcmul(y, x, D.to(dtype)[:, None] if D.ndim == 1 else D.to(dtype))
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y


def _advance_torch(replay: TreeScanReplay, state: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
    batch, num_nodes, groups, states = replay.B.shape
    dtype = accumulator_dtype(replay.x, replay.dt, state)
    dt = replay.dt.to(dtype)
    between, total, on_path = path_segment_sums(dt * replay.A.to(dtype), tables, nodes)
    weights = between.exp() * dt * on_path.unsqueeze(-1)  # [B, N, H]
    x = blank(replay.x, replay.valid).to(dtype) * weights.unsqueeze(-1)
    x = x.view(batch, num_nodes, groups, -1).permute(0, 2, 3, 1).reshape(batch * groups, -1, num_nodes)
    B = blank(replay.B, replay.valid).to(dtype).transpose(1, 2).reshape(-1, num_nodes, states)
    kept = (state.to(dtype) * total.exp()[:, :, None, None]).reshape(batch * groups, -1, states)
    return kept.baddbmm_(x, B).view(state.shape).to(state.dtype)
