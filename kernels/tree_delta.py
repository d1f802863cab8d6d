"""Gated delta rule (arXiv 2412.06464) and Kimi delta attention over the nodes of a token tree.

Per head, with cs the sum of g along the path, S0 the committed state and L_ij = exp(cs_i - cs_j) on ancestors j of i:

    U = I + strictly lower part of beta_i (k_i . k_j) L_ij          unit lower triangular in topological order
    u = U^-1 (beta (v - exp(cs) k S0))
    o = scale (exp(cs) q S0 + ((q k^T) * L) u)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels import reference
from draftwood.kernels.checks import Shapes, blank
from draftwood.kernels.decay import accumulator_dtype, path_segment_sums, segment_sums
from draftwood.kernels.dispatch import implementation
from draftwood.kernels.tables import TreeTables

L2_EPSILON = 1e-6
# Elements of the pairwise decays per channel that are held at a time.
PAIR_BUDGET = 1 << 24


@dataclass(frozen=True)
class TreeDeltaReplay:
    """What a tree delta rule leaves for the commit: no state.

    Attributes:
        k: [B, N, Hk, Dk] keys, normalised.
        u: [B, N, H, Dv] what each node writes under its key.
        g: [B, N, H] or [B, N, H, Dk] log decays; 0 at invalid nodes.
    """

    k: Tensor
    u: Tensor
    g: Tensor

    def to(self, *args: object, **kwargs: object) -> "TreeDeltaReplay":
        """Itself: transformers converts what a scan returns as its final state."""
        return self

    def advance(self, state: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
        """The state after the path from the root to `nodes` is accepted; `state` is left as it is.

        Args:
            state: [B, H, Dk, Dv] the state that the tree started from.
            nodes: [B] int64, the last accepted node of each row; -1 keeps the row's state.

        Returns:
            [B, H, Dk, Dv] in the dtype of `state`.

        Raises:
            ValueError: `state` or `nodes` has another shape.
        """
        shapes = Shapes("TreeDeltaReplay.advance", tables)
        shapes.check("k", self.k, "B N Hk Dk")
        shapes.check("u", self.u, "B N H Dv")
        shapes.check("state", state, "B H Dk Dv")
        shapes.check("nodes", nodes, "B")
        match implementation(self.u):
            case "reference":
                k = _repeat_heads(self.k, self.u.shape[2])

                def step(row: int, node: int, at: Tensor) -> Tensor:
                    return reference.delta_step(at, k[row, node], self.u[row, node], self.g[row, node])

                return reference.replay(tables, state, nodes, step)
            case "triton":
                from draftwood.kernels import tree_delta_triton

                return tree_delta_triton.advance(self.k, self.u, self.g, state, tables, nodes)
            case _:
                return _advance_torch(self, state, tables, nodes)


def tree_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    tables: TreeTables,
    *,
    initial_state: Tensor,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    valid: Tensor | None = None,
) -> tuple[Tensor, TreeDeltaReplay]:
    """Outputs of all nodes of a tree, each as if its path had been scanned after the committed tokens.

    Scores, decays and states are float32 whatever the inputs' dtype (float64 where one of v, g, initial_state is).

    Args:
        q: [B, N, Hk, Dk].
        k: [B, N, Hk, Dk], each head shared by H / Hk consecutive heads of v.
        v: [B, N, H, Dv].
        g: [B, N, H] log decay, at most 0; or [B, N, H, Dk], one per key channel (Kimi delta attention).
        beta: [B, N, H] strength of the write.
        initial_state: [B, H, Dk, Dv] the committed state.
        scale: of the queries, Dk ** -0.5 where None.
        use_qk_l2norm: whether q and k are divided by their norm, sqrt(sum of squares + 1e-6), first.
        valid: [B, N] bool. Other nodes are padding: their inputs are not read as numbers, their outputs are 0, and no
            valid node descends from them.

    Returns:
        o [B, N, H, Dv] in the dtype of v, and the replay that advances the state once a path is accepted.

    Raises:
        ValueError: shapes that do not fit together.
    """
    shapes = Shapes("tree_delta", tables)
    shapes.check("q", q, "B N Hk Dk")
    shapes.check("k", k, "B N Hk Dk")
    shapes.check("v", v, "B N H Dv")
    shapes.check("g", g, "B N H" if g.ndim == 3 else "B N H Dk")
    shapes.check("beta", beta, "B N H")
    shapes.check("initial_state", initial_state, "B H Dk Dv")
    shapes.check("valid", valid, "B N")
    shapes.divides("Hk", "H")
    shapes.rows(tables)

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = implementation(v)
    dtype = accumulator_dtype(v, g, initial_state)
    out_dtype = v.dtype
    q, k, v, g, beta = (blank(tensor, valid) for tensor in (q, k, v, g, beta))
    if chosen != "reference":
        q, k, v, g, beta = (tensor.to(dtype) for tensor in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = _l2_normalized(q), _l2_normalized(k)
    match chosen:
        case "reference":
            repeated_q, repeated_k = (_repeat_heads(tensor, v.shape[2]) for tensor in (q, k))
            o, u = reference.tree_delta(repeated_q, repeated_k, v, g, beta, tables, initial_state, scale, valid)
        case "triton":
            from draftwood.kernels import tree_delta_triton

            o, u = tree_delta_triton.tree_delta(q, k, v, g, beta, tables, initial_state, scale)
        case _:
            o, u = _tree_delta_torch(q, k, v, g, beta, tables, initial_state.to(dtype), scale)
    return o.to(out_dtype), TreeDeltaReplay(k, u, g)


def _advance_torch(replay: TreeDeltaReplay, state: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
    between, total, on_path = path_segment_sums(replay.g, tables, nodes)
    if replay.g.ndim == 3:
        between, total = between.unsqueeze(-1), total.unsqueeze(-1)
    written = _repeat_heads(replay.k, replay.u.shape[2]) * (between.exp() * on_path[:, :, None, None])
    new = torch.einsum("bnhk,bnhv->bhkv", written, replay.u)
    return (new + total.exp().unsqueeze(-1) * state.to(new.dtype)).to(state.dtype)


def _l2_normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPSILON)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, Hk, D] -> [B, N, heads, D]."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def _tree_delta_torch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tables: TreeTables, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    batch, nodes, heads, _ = v.shape
    v, beta = v.transpose(1, 2), beta.transpose(1, 2).unsqueeze(-1)  # [B, H, N, Dv], [B, H, N, 1]
    if g.ndim == 3:
        between, total = segment_sums(g.transpose(1, 2).contiguous(), tables)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        scores = torch.cat([k, q], dim=2) @ k.transpose(2, 3)  # [B, Hk, 2 N, N]
        k, q, scores = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, q, scores))
        scores = scores.view(batch, heads, 2, nodes, nodes) * between.exp().unsqueeze(2)
        carried_decay = total.exp().unsqueeze(-1)  # [B, H, N, 1]
    else:
        q, k = (_repeat_heads(x, heads).transpose(1, 2) for x in (q, k))
        scores = _channel_scores(q, k, g, tables)
        carried_decay = tables.path_values(g).transpose(1, 2).exp()  # [B, H, N, Dk]
    scores = torch.where(tables.ancestors[:, None, None], scores, 0.0)
    from_keys, from_queries = scores.unbind(2)  # [B, H, N, N] each

    carried = torch.cat([k * carried_decay, q * carried_decay], dim=2) @ initial_state  # [B, H, 2 N, Dv]
    carried_keys, carried_queries = carried.split(nodes, dim=2)
    # The solver takes the diagonal as 1 and reads nothing above it.
    u = torch.linalg.solve_triangular(from_keys * beta, beta * (v - carried_keys), upper=False, unitriangular=True)
    o = scale * (carried_queries + from_queries @ u)
    return o.transpose(1, 2).contiguous(), u.transpose(1, 2)


def _channel_scores(q: Tensor, k: Tensor, g: Tensor, tables: TreeTables) -> Tensor:
    """(k_i . k_j) and (q_i . k_j) with a decay per channel inside the product: [B, H, 2, N, N].

    The decay of a pair can't be split into a factor per node without overflow: pairs are held, some rows at a time.
    """
    batch, heads, nodes, width = k.shape
    g = g.reshape(batch, nodes, -1)
    ancestors = tables.ancestors.expand(batch, -1, -1)
    below = ancestors.transpose(1, 2) & ~torch.eye(nodes, dtype=torch.bool, device=k.device)  # [B, j, l]
    rows = max(1, PAIR_BUDGET // (batch * heads * nodes * width))
    blocks = []
    for first in range(0, nodes, rows):
        here = slice(first, first + rows)
        segments = (ancestors[:, here, None] & below[:, None]).to(k.dtype)  # [B, rows, N, l]
        between = (segments.flatten(1, 2) @ g).view(batch, -1, nodes, heads, width).permute(0, 3, 1, 2, 4)
        decayed = between.exp() * k.unsqueeze(2)  # [B, H, rows, N, Dk]
        both = torch.stack([k[:, :, here], q[:, :, here]], dim=3)  # [B, H, rows, 2, Dk]
        blocks.append(both @ decayed.transpose(-1, -2))
    return torch.cat(blocks, dim=2).transpose(2, 3)
