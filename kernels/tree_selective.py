"""Mamba-1 (selective scan, arXiv 2312.00752) over the nodes of a token tree.

The decay differs per channel and state, so a pairwise form would cost N times more exponentials than the recurrence:
the tree is walked by levels instead, every level continuing from its parents' states.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.kernels import reference
from draftwood.kernels.checks import Shapes, blank
from draftwood.kernels.decay import accumulator_dtype, discretize, path_segment_sums
from draftwood.kernels.dispatch import implementation
from draftwood.kernels.tables import TreeTables


@dataclass(frozen=True)
class TreeSelectiveReplay:
    """What a tree scan leaves for the commit: the inputs of the nodes, no state.

    Attributes:
        x: [B, D, N].
        dt: [B, D, N] float32 or float64, processed; 0 at invalid nodes.
        A: [D, S].
        B: [B, S, N].
        valid: [B, N] bool, or None.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    valid: Tensor | None = None

    def to(self, *args: object, **kwargs: object) -> "TreeSelectiveReplay":
        """Itself: transformers converts what a scan returns as its final state."""
        return self

    def advance(self, state: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
        """The state after the path from the root to `nodes` is accepted; `state` is left as it is.

        Args:
            state: [B, D, S] the state that the tree started from.
            nodes: [B] int64, the last accepted node of each row; -1 keeps the row's state.

        Returns:
            [B, D, S] in the dtype of `state`.

        Raises:
            ValueError: `state` or `nodes` has another shape.
        """
        shapes = Shapes("TreeSelectiveReplay.advance", tables)
        shapes.check("x", self.x, "B D N")
        shapes.check("B", self.B, "B S N")
        shapes.check("state", state, "B D S")
        shapes.check("nodes", nodes, "B")
        match implementation(self.x):
            case "reference":

                def step(row: int, node: int, at: Tensor) -> Tensor:
                    x, dt, B = (tensor[row, :, node] for tensor in (self.x, self.dt, self.B))
                    return reference.selective_step(at, x, dt, self.A, B)

                return reference.replay(tables, state, nodes, step)
            case "triton":
                from draftwood.kernels import tree_selective_triton

                dtype = accumulator_dtype(self.x, self.dt, state)
                return tree_selective_triton.advance(self.x, self.dt, self.A, self.B, state, tables, nodes, dtype)
            case _:
                return _advance_torch(self, state, tables, nodes)


def tree_selective(
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
    valid: Tensor | None = None,
) -> tuple[Tensor, TreeSelectiveReplay]:
    """Outputs of all nodes of a tree, each as if its path had been scanned after the committed tokens.

    Decays and states are float32 whatever the inputs' dtype (float64 where one of x, dt, initial_state is).

    Args:
        x: [B, D, N].
        dt: [B, D, N] raw time step.
        A: [D, S], negative.
        B: [B, S, N].
        C: [B, S, N].
        initial_state: [B, D, S] the committed state.
        D: [D] skip connection.
        z: [B, D, N], the output is multiplied by silu(z).
        dt_bias: [D].
        dt_softplus: whether softplus is applied to the time step.
        valid: [B, N] bool. Other nodes are padding: their inputs are not read as numbers, their outputs are 0, and no
            valid node descends from them.

    Returns:
        y [B, D, N] in the dtype of x, and the replay that advances the state once a path is accepted.

    Raises:
        ValueError: shapes that do not fit together.
    """
    shapes = Shapes("tree_selective", tables)
    shapes.check("x", x, "B D N")
    shapes.check("dt", dt, "B D N")
    shapes.check("A", A, "D S")
    shapes.check("B", B, "B S N")
    shapes.check("C", C, "B S N")
    shapes.check("initial_state", initial_state, "B D S")
    shapes.check("D", D, "D")
    shapes.check("z", z, "B D N")
    shapes.check("dt_bias", dt_bias, "D")
    shapes.check("valid", valid, "B N")
    shapes.rows(tables)

    bias = None if dt_bias is None else dt_bias[:, None]
    match implementation(x):
        case "reference":
            step = blank(discretize(dt, bias, dt_softplus), valid, node_dim=2)
            y = reference.tree_selective(x, step, A, B, C, tables, initial_state, D, z, valid)
        case "triton":
            from draftwood.kernels import tree_selective_triton

            dtype = accumulator_dtype(x, dt, initial_state)
            y, step = tree_selective_triton.tree_selective(
                x, dt, A, B, C, tables, initial_state, D, z, dt_bias, dt_softplus, valid, dtype
            )
        case _:
            step = blank(discretize(dt, bias, dt_softplus), valid, node_dim=2)
            known_x, known_B, known_C = (blank(tensor, valid, node_dim=2) for tensor in (x, B, C))
            gate = blank(z, valid, node_dim=2)
            y = _tree_selective_torch(known_x, step, A, known_B, known_C, tables, initial_state, D, gate)
    return y.to(x.dtype), TreeSelectiveReplay(x, step, A, B, valid)


def _advance_torch(replay: TreeSelectiveReplay, state: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
    dtype = accumulator_dtype(replay.x, replay.dt, state)
    x, B = (blank(tensor, replay.valid, node_dim=2) for tensor in (replay.x, replay.B))
    x, dt, B = (tensor.to(dtype).transpose(1, 2) for tensor in (x, replay.dt, B))  # [B, N, ...]
    A = replay.A.to(dtype)
    # The decay between two nodes is exp(A times the time between them).
    between, total, on_path = path_segment_sums(dt, tables, nodes)
    driven = (between.unsqueeze(-1) * A).exp() * (dt * x * on_path.unsqueeze(-1)).unsqueeze(-1) * B.unsqueeze(2)
    return ((total.unsqueeze(-1) * A).exp() * state.to(dtype) + driven.sum(1)).to(state.dtype)


def _levels(tables: TreeTables, batch: int) -> tuple[Tensor, Tensor, list[int], list[Tensor]]:
    """The nodes of a batch in order of depth: their places in [B * N], the way back, the size of each level,
    and for each level after the first its parents' places in the level before.
    """
    nodes = tables.num_nodes
    depth = tables.depth.expand(batch, nodes).reshape(-1)
    parents = tables.parents.expand(batch, nodes) + torch.arange(batch, device=depth.device)[:, None] * nodes
    order = depth.argsort(stable=True)
    back = order.argsort()
    sizes = depth.bincount(minlength=tables.max_depth + 1).tolist()
    places = back[parents.reshape(-1).clamp(min=0)[order]].split(sizes)
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return order, back, sizes, [place - starts[level] for level, place in enumerate(places[1:])]


def _tree_selective_torch(
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
    batch, width, nodes = x.shape
    dtype = accumulator_dtype(x, dt, initial_state)
    order, back, sizes, parents = tables.derived(("levels", batch), lambda: _levels(tables, batch))

    def by_level(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).reshape(batch * nodes, -1)[order].to(dtype)

    step, A = by_level(dt), A.to(dtype)
    decay = (step.unsqueeze(-1) * A).exp()  # [B * N, D, S]
    driven = (step * by_level(x)).unsqueeze(-1) * by_level(B).unsqueeze(1)
    decays, states = decay.split(sizes), list(driven.split(sizes))
    # Every row has one root, and the roots are in the order of the rows.
    states[0] = states[0] + decays[0] * initial_state.to(dtype)
    for level, places in enumerate(parents, start=1):
        states[level] = torch.addcmul(states[level], decays[level], states[level - 1][places])
    y = (torch.cat(states) @ by_level(C).unsqueeze(-1)).squeeze(-1)[back]  # [B * N, D]
    y = y.view(batch, nodes, width).transpose(1, 2)
    if D is not None:
        y = y + D.to(dtype)[:, None] * x
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y
