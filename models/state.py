"""The decode state of a batch: what of the sequence so far the target has taken in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.tables import TreeTables
from draftwood.models.cache import DecodeCache
from draftwood.models.transfer import send
from draftwood.models.tree import Tree


@dataclass
class DecodeState:
    """Attributes:
    cache: committed keys, values, conv windows and recurrent states of every layer.
    lengths: tokens committed in each row.
    features: [B, T, H] features of the prompt, row b's own lengths[b] first; what a draft is started with.
    last_logits: [B, V] logits after the last prompt token.
    pending: the tree of the last verify, which `commit` takes its path from.
    capacity: tokens the state has room for, once `fix_shapes` was called; else None.
    """

    cache: DecodeCache
    lengths: list[int]
    features: Tensor
    last_logits: Tensor
    pending: Tree | None = None
    capacity: int | None = None

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

    @property
    def start(self) -> int:
        """The key/value column of a tree's root: behind the longest row, or behind the fixed capacity."""
        return self.width if self.capacity is None else self.capacity

    def fix_shapes(self, capacity: int, max_nodes: int) -> None:
        """Gives every buffer room for `capacity` tokens and trees of `max_nodes`, so that no forward changes a shape.

        Raises:
            ValueError: less than what is committed already.
        """
        if capacity < self.width:
            raise ValueError(f"capacity {capacity} is less than the {self.width} tokens already in the state")
        self.capacity = capacity
        self.cache.fix_shapes(capacity, max_nodes)

    def check_room(self, depth: int) -> None:
        """Raises:
        ValueError: a fixed capacity that `depth` more tokens would pass.
        """
        if self.capacity is not None and self.width + depth > self.capacity:
            raise ValueError(
                f"the state was fixed to {self.capacity} tokens and holds {self.width}; a path of {depth} does not fit"
            )

    def advance(self, counts: list[int]) -> None:
        """Counts newly committed tokens in; what was pending is done with."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.pending = None
        if self.capacity is None:
            self.cache.set_start(self.width)

    def device_lengths(self, device: torch.device) -> Tensor:
        """[B] int64"""
        return send(self.lengths, device)


def attention_mask(lengths: Tensor, start: int, tables: TreeTables, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[B, 1, n, start + n] additive mask: the committed prefix of a row, then a node's ancestors.

    Args:
        lengths: [B] int64, committed tokens of each row.
        start: column of the root.
        valid: [B, n] bool, None where no node is padding.
    """
    device, nodes = tables.parents.device, tables.num_nodes
    prefix = (torch.arange(start, device=device) < lengths[:, None])[:, None, :]
    below = tables.ancestors
    if valid is not None:  # a padding node sees itself, so that no row of scores is empty
        below = (below & valid[:, None, :]) | torch.eye(nodes, dtype=torch.bool, device=device)
    shape = (lengths.shape[0], nodes, -1)
    visible = torch.cat([prefix.expand(shape), below.expand(shape)], dim=-1)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def check_paths(paths: Sequence[Sequence[int]], tree: Tree, batch_size: int) -> None:
    """Checks that every path runs from the root downwards through `tree`, or is empty.

    Raises:
        ValueError: the row and the step of its path that is not an edge of the tree.
    """
    if len(paths) != batch_size:
        raise ValueError(f"commit needs one path per row: the state has {batch_size} rows, got {len(paths)} paths")
    for row, path in enumerate(paths):
        own = row if tree.num_rows > 1 else 0
        parents = tree.rows[own]
        above = -1
        for node in path:
            is_node = 0 <= node < len(parents) and (not tree.is_padded or bool(tree.valid[own, node]))
            if not is_node or parents[node] != above:
                raise ValueError(
                    f"row {row}: path {list(path)} is not a path of the tree: node {node} is not a child of "
                    f"{'nothing (the root is node 0)' if above < 0 else f'node {above}'}"
                )
            above = node


def accepted_columns(paths: Sequence[Sequence[int]], lengths: list[int], start: int) -> tuple[Tensor, Tensor] | None:
    """Where the keys and values of the accepted nodes are and where they go, both [B, K]; None if all are in place.

    Node i of a tree lies at column start + i. A row that accepted less repeats its last move, or copies the root onto
    itself.
    """
    moves = []
    for path, length in zip(paths, lengths, strict=True):
        moves.append([(start + node, length + k) for k, node in enumerate(path)] or [(start, start)])
    if all(source == destination for row in moves for source, destination in row):
        return None
    size = max(map(len, moves))
    padded = torch.tensor([row + [row[-1]] * (size - len(row)) for row in moves])
    return padded[..., 0], padded[..., 1]
