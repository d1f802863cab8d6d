"""Attention of the nodes of a token tree: to the committed prefix and to the node's own path."""

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.kernels import reference
from draftwood.kernels.checks import Shapes, blank
from draftwood.kernels.decay import accumulator_dtype
from draftwood.kernels.dispatch import implementation
from draftwood.kernels.tables import TreeTables


def tree_attention(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_tree: Tensor,
    v_tree: Tensor,
    lengths: Tensor,
    tables: TreeTables,
    *,
    scale: float | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v of every node.

    Args:
        q: [B, Hq, N, Dh], positions already applied.
        k_prefix: [B, Hkv, L, Dh], each head shared by Hq / Hkv consecutive query heads.
        v_prefix: [B, Hkv, L, Dv].
        k_tree: [B, Hkv, N, Dh].
        v_tree: [B, Hkv, N, Dv].
        lengths: [B] int64, how many columns of the prefix each row has, from the left; the others are not read as
            numbers.
        scale: Dh ** -0.5 where None.
        valid: [B, N] bool. Other nodes are padding: their inputs are not read as numbers, their outputs are 0, and no
            valid node descends from them.

    Returns:
        [B, Hq, N, Dv] in the dtype of q.

    Raises:
        ValueError: shapes that do not fit together.
    """
    shapes = Shapes("tree_attention", tables)
    shapes.check("q", q, "B Hq N Dh")
    shapes.check("k_prefix", k_prefix, "B Hkv L Dh")
    shapes.check("v_prefix", v_prefix, "B Hkv L Dv")
    shapes.check("k_tree", k_tree, "B Hkv N Dh")
    shapes.check("v_tree", v_tree, "B Hkv N Dv")
    shapes.check("lengths", lengths, "B")
    shapes.check("valid", valid, "B N")
    shapes.divides("Hkv", "Hq")
    shapes.rows(tables)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    match implementation(q):
        case "reference":
            return reference.tree_attention(q, k_prefix, v_prefix, k_tree, v_tree, lengths, tables, scale, valid)
        case "triton":
            from draftwood.kernels import tree_attention_triton

            dtype = accumulator_dtype(q)
            return tree_attention_triton.tree_attention(
                q, k_prefix, v_prefix, k_tree, v_tree, lengths, tables, scale, valid, dtype
            )
        case _:
            return _tree_attention_torch(q, k_prefix, v_prefix, k_tree, v_tree, lengths, tables, scale, valid)


def _tree_attention_torch(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_tree: Tensor,
    v_tree: Tensor,
    lengths: Tensor,
    tables: TreeTables,
    scale: float,
    valid: Tensor | None,
) -> Tensor:
    batch, _, nodes, _ = q.shape
    columns = k_prefix.shape[2]
    committed = torch.arange(columns, device=q.device) < lengths[:, None]  # [B, L]
    keys = torch.cat([blank(k_prefix, committed, node_dim=2), blank(k_tree, valid, node_dim=2)], dim=2)
    values = torch.cat([blank(v_prefix, committed, node_dim=2), blank(v_tree, valid, node_dim=2)], dim=2)
    ancestors = tables.ancestors.expand(batch, -1, -1)
    mask = torch.cat([committed[:, None].expand(-1, nodes, -1), ancestors], dim=2)
    o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None], scale=scale, enable_gqa=True)
    return blank(o, valid, node_dim=2)
