"""The decode state of a batch: what of the sequence so far the target has taken in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftwood.kernels.tables import TreeTables
from draftwood.models.cache import DecodeCache


class TokenTree(Protocol):
    """What the target asks of a tree; `draftwood.decode.tree.Tree` is one."""

    valid: Tensor

    @property
    def num_rows(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def rows(self) -> list[list[int]]: ...
    def tables(self, device: torch.device | str = "cpu") -> TreeTables: ...


@dataclass
class DecodeState:
    """Attributes:
    cache: committed keys, values, conv windows and recurrent states of every layer.
    lengths: tokens committed in each row.
    features: [B, T, H] features of the prompt, row b's own lengths[b] first; what a draft is started with.
    last_logits: [B, V] logits after the last prompt token.
    pending: the tree of the last verify, which `commit` takes its path from.
    """

    cache: DecodeCache
    lengths: list[int]
    features: Tensor
    last_logits: Tensor
    pending: TokenTree | None = None

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        """Columns taken by the longest row."""
        return max(self.lengths)

    @property
    def is_ragged(self) -> bool:
        return min(self.lengths) != self.width

    def positions(self, tables: TreeTables, device: torch.device) -> Tensor:
        """[B, n] int64 positions of tree nodes: committed length + depth."""
        return torch.tensor(self.lengths, device=device)[:, None] + tables.depth

    def attention_mask(self, tables: TreeTables, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, n, width + n] additive mask: the committed prefix of the row, then ancestors."""
        device = tables.parents.device
        lengths = torch.tensor(self.lengths, device=device)
        nodes = tables.num_nodes
        prefix = (torch.arange(self.width, device=device) < lengths[:, None])[:, None, :]
        below = tables.ancestors if valid is None else tables.ancestors & valid[:, None, :]
        if valid is not None:  # a padding node sees itself, so that no row of scores is empty
            below = below | torch.eye(nodes, dtype=torch.bool, device=device)
        visible = torch.cat([prefix.expand(-1, nodes, -1), below.expand(self.batch_size, -1, -1)], dim=-1)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def check_paths(paths: Sequence[Sequence[int]], tree: TokenTree, batch_size: int) -> None:
    """Checks that every path runs from the root downwards through `tree`, or is empty.

    Raises:
        ValueError: the row and the step of its path that is not an edge of the tree.
    """
    if len(paths) != batch_size:
        raise ValueError(f"commit needs one path per row: the state has {batch_size} rows, got {len(paths)} paths")
    for row, path in enumerate(paths):
        parents = tree.rows[row if tree.num_rows > 1 else 0]
        above = -1
        for node in path:
            if not 0 <= node < len(parents) or parents[node] != above:
                raise ValueError(
                    f"row {row}: path {list(path)} is not a path of the tree: node {node} is not a child of "
                    f"{'nothing (the root is node 0)' if above < 0 else f'node {above}'}"
                )
            above = node


def accepted_columns(paths: Sequence[Sequence[int]], lengths: list[int], width: int) -> tuple[Tensor, Tensor] | None:
    """Where the keys and values of the accepted nodes are and where they go, both [B, K]; None if all are in place.

    Node i of a tree lies at column width + i. Rows that accepted less repeat a move of their own, or copy a column
    onto itself.
    """
    moves = []
    for path, length in zip(paths, lengths, strict=True):
        moves.append([(width + node, length + k) for k, node in enumerate(path)] or [(width, width)])
    if all(source == destination for row in moves for source, destination in row):
        return None
    size = max(map(len, moves))
    padded = torch.tensor([row + [row[-1]] * (size - len(row)) for row in moves])
    return padded[..., 0], padded[..., 1]
