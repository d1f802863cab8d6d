"""Every operator as a plain recurrence, in the dtype it is given: in float64 it is the truth. Read this first.

The legend of the whole project: B batch, T tokens, N nodes of a tree, H heads, P head width, S state width, G groups,
D hidden width, V vocabulary, K top-K, C chunk; for a convolution, K taps and a window of W committed columns; for the
delta rule, Dk and Dv the widths of keys and values. Arguments named A, B, C, D are the matrices of the state space
papers. A tree has one rule here: a node continues from its parent's state, the root from the committed state.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.kernels.tables import TreeTables


def walk(tables: TreeTables, row: int, start: Tensor, step: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    """The state after every node of one row: `step(node, parent's state)`, `start` for the root."""
    states: list[Tensor] = []
    for node, parent in enumerate(_row_parents(tables, row)):
        states.append(step(node, start if parent < 0 else states[parent]))
    return states


def path_to(tables: TreeTables, row: int, node: int) -> list[int]:
    """Nodes from the root down to `node`; nothing for node -1."""
    parents = _row_parents(tables, row)
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def _row_parents(tables: TreeTables, row: int) -> list[int]:
    return tables.parents[row if tables.num_rows > 1 else 0].tolist()


def _is_valid(valid: Tensor | None, row: int, node: int) -> bool:
    return valid is None or bool(valid[row, node])


def replay(tables: TreeTables, state: Tensor, nodes: Tensor, step: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """Committed states after accepting node `nodes[b]` of each row: `step(row, node, state)` along its path."""
    new = state.clone()
    for row, last in enumerate(nodes.tolist()):
        for node in path_to(tables, row, last):
            new[row] = step(row, node, new[row])
    return new


def time_step(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float]) -> Tensor:
    """clamp(softplus(dt + dt_bias), dt_limit)."""
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    return dt.clamp(*dt_limit)


def scan_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Mamba-2 (arXiv 2405.21060): S <- exp(dt A) S + dt x B^T, per head.

    state [H, P, S], x [H, P], dt [H] processed, A [H], B [G, S] -> [H, P, S].
    """
    B = B.repeat_interleave(x.shape[0] // B.shape[0], dim=0)
    decay = torch.exp(dt * A)
    return decay[:, None, None] * state + dt[:, None, None] * x[:, :, None] * B[:, None, :]


def tree_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    tables: TreeTables,
    initial_state: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """y = S C + D x, gated by silu(z), at every node; `dt` is processed. Shapes as in `kernels.tree_scan`."""
    y = torch.zeros_like(x)
    heads = x.shape[2]
    for row in range(x.shape[0]):

        def step(node: int, state: Tensor, row: int = row) -> Tensor:
            if not _is_valid(valid, row, node):
                return state
            return scan_step(state, x[row, node], dt[row, node], A, B[row, node])

        for node, state in enumerate(walk(tables, row, initial_state[row], step)):
            if not _is_valid(valid, row, node):
                continue
            c = C[row, node].repeat_interleave(heads // C.shape[2], dim=0)
            out = (state * c[:, None, :]).sum(-1)
            if D is not None:
                out = out + (D[:, None] if D.ndim == 1 else D) * x[row, node]
            if z is not None:
                out = out * F.silu(z[row, node])
            y[row, node] = out
    return y


def tree_conv(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    tables: TreeTables,
    bias: Tensor | None = None,
    activation: str | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Causal depthwise convolution along every path, the committed window before the root."""
    y = torch.zeros_like(x)
    taps = weight.shape[1]
    for row in range(x.shape[0]):
        for node in range(tables.num_nodes):
            if not _is_valid(valid, row, node):
                continue
            path = path_to(tables, row, node)
            seen = torch.cat([window[row], x[row][:, path]], dim=1)[:, -taps:]
            out = (seen * weight).sum(1)
            if bias is not None:
                out = out + bias
            y[row, :, node] = out if activation is None else F.silu(out)
    return y


def tree_conv_commit(window: Tensor, x: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor:
    """The last W inputs once the path to `nodes[b]` is accepted."""
    new = torch.empty_like(window)
    for row, last in enumerate(nodes.tolist()):
        path = path_to(tables, row, last)
        new[row] = torch.cat([window[row], x[row][:, path]], dim=1)[:, -window.shape[2] :]
    return new


def delta_correction(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """u = beta (v - k exp(g) S): what the gated delta rule (arXiv 2412.06464) writes under the key k, per head.

    state [H, Dk, Dv], k [H, Dk], v [H, Dv], g [H] or [H, Dk] (Kimi delta attention), beta [H] -> [H, Dv].
    """
    return beta[:, None] * (v - (k[:, :, None] * delta_decay(state, g)).sum(1))


def delta_decay(state: Tensor, g: Tensor) -> Tensor:
    """exp(g) S."""
    decay = torch.exp(g)
    return (decay[:, None, None] if g.ndim == 1 else decay[:, :, None]) * state


def delta_step(state: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """S <- exp(g) S + k u^T."""
    return delta_decay(state, g) + k[:, :, None] * u[:, None, :]


def tree_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    tables: TreeTables,
    initial_state: Tensor,
    scale: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o = scale S^T q at every node, and u; q and k normalised and with as many heads as v."""
    o, u = torch.zeros_like(v), torch.zeros_like(v)
    for row in range(v.shape[0]):

        def step(node: int, state: Tensor, row: int = row) -> Tensor:
            if not _is_valid(valid, row, node):
                return state
            u[row, node] = delta_correction(state, k[row, node], v[row, node], g[row, node], beta[row, node])
            return delta_step(state, k[row, node], u[row, node], g[row, node])

        for node, state in enumerate(walk(tables, row, initial_state[row], step)):
            if _is_valid(valid, row, node):
                o[row, node] = scale * (q[row, node][:, :, None] * state).sum(1)
    return o, u


def selective_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Mamba-1 (arXiv 2312.00752): S <- exp(dt A) S + dt x B^T.

    state [D, S], x [D], dt [D] processed, A [D, S], B [S] -> [D, S].
    """
    return torch.exp(dt[:, None] * A) * state + (dt * x)[:, None] * B


def tree_selective(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    tables: TreeTables,
    initial_state: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """y = S C + D x, gated by silu(z), at every node; `dt` is processed."""
    y = torch.zeros_like(x)
    for row in range(x.shape[0]):

        def step(node: int, state: Tensor, row: int = row) -> Tensor:
            if not _is_valid(valid, row, node):
                return state
            return selective_step(state, x[row, :, node], dt[row, :, node], A, B[row, :, node])

        for node, state in enumerate(walk(tables, row, initial_state[row], step)):
            if not _is_valid(valid, row, node):
                continue
            out = (state * C[row, :, node]).sum(1)
            if D is not None:
                out = out + D * x[row, :, node]
            if z is not None:
                out = out * F.silu(z[row, :, node])
            y[row, :, node] = out
    return y


def tree_attention(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_tree: Tensor,
    v_tree: Tensor,
    lengths: Tensor,
    tables: TreeTables,
    scale: float,
    valid: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the committed prefix and the node's own path."""
    batch, heads, num_nodes, _ = q.shape
    o = torch.zeros(batch, heads, num_nodes, v_tree.shape[-1], dtype=q.dtype, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        for node in range(num_nodes):
            if not _is_valid(valid, row, node):
                continue
            path = path_to(tables, row, node)
            for head in range(heads):
                kv = head * k_tree.shape[1] // heads
                keys = torch.cat([k_prefix[row, kv, :length], k_tree[row, kv, path]])
                values = torch.cat([v_prefix[row, kv, :length], v_tree[row, kv, path]])
                o[row, head, node] = torch.softmax(scale * (keys @ q[row, head, node]), dim=0) @ values
    return o
