"""Index tables of a token tree, computed once per tree and shared by every layer.

A tree is a row of parent indices: node 0 is the root, its parent is -1, and a parent comes before its children.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

Table = TypeVar("Table")


@dataclass(frozen=True, eq=False)
class TreeTables:
    """What every tree operator needs to know of a batch of trees.

    Attributes:
        parents: [B, N] int64, -1 for the root. `B` is 1 where all rows of a batch share one tree.
        ancestors: [B, N, N] bool, `ancestors[b, i, j]` is true where j is i or an ancestor of i.
        depth: [B, N] int64, 0 for the root.
        max_depth: the largest depth, known on the host (so that no operator needs to ask the device).
    """

    parents: Tensor
    ancestors: Tensor
    depth: Tensor
    max_depth: int
    _derived: dict[Hashable, object] = field(default_factory=dict, repr=False)

    @classmethod
    def from_parents(cls, parents: Tensor, max_depth: int | None = None) -> "TreeTables":
        """Tables of `parents` [B, N] without a host synchronisation where `max_depth` is given.

        The ancestor relation is the transitive closure of "is parent of", by repeated squaring.
        """
        nodes = parents.shape[1]
        columns = torch.arange(nodes, device=parents.device)
        step = (parents[:, :, None] == columns) | torch.eye(nodes, dtype=torch.bool, device=parents.device)
        reach = 1
        bound = nodes - 1 if max_depth is None else max_depth
        while reach < bound:
            step = (step.float() @ step.float()) > 0
            reach *= 2
        depth = step.sum(-1) - 1
        if max_depth is None:
            max_depth = int(depth.max())
        return cls(parents, step, depth, max_depth)

    @property
    def num_rows(self) -> int:
        return self.parents.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    def derived(self, key: Hashable, build: Callable[[], Table]) -> Table:
        """`build()`, once per tree: the layers of a model ask for the same tables with the same `key`."""
        if key not in self._derived:
            self._derived[key] = build()
        return self._derived[key]  # type: ignore[return-value]

    def path_values(self, values: Tensor) -> Tensor:
        """Sum of `values` [B, N, ...] over each node and its ancestors, same shape: the cumulative decay per path."""
        batch = values.shape[0]
        flat = values.reshape(batch, self.num_nodes, -1)
        mask = self.ancestors.to(flat.dtype).expand(batch, -1, -1)
        return (mask @ flat).reshape(values.shape)

    def lookback(self, steps: int) -> Tensor:
        """[rows, N, steps] int64: entry d is the ancestor d levels above the node (0: the node itself).

        Where the path is shorter, the entry counts back from the root into what was committed before it:
        -1 is the last committed token, -2 the one before.
        """
        return self.derived(("lookback", steps), lambda: self._build_lookback(steps))

    def _build_lookback(self, steps: int) -> Tensor:
        node = torch.arange(self.num_nodes, device=self.parents.device).expand_as(self.parents)
        columns = []
        for distance in range(steps):
            columns.append(torch.where(self.depth >= distance, node, self.depth - distance))
            node = self.parents.gather(1, node.clamp(min=0))
        return torch.stack(columns, dim=-1)


def newest_ancestors(ancestors: Tensor) -> Tensor:
    """The parents of nodes that grow a tree: [R, m] int64, places from 1 among the nodes before them, 0 where none is.

    Args:
        ancestors: [R, m, earlier] bool, which of the earlier nodes are ancestors. The one added last is the parent.
    """
    if ancestors.shape[-1] == 0:
        return torch.zeros(ancestors.shape[:-1], dtype=torch.int64, device=ancestors.device)
    return (ancestors * torch.arange(1, ancestors.shape[-1] + 1, device=ancestors.device)).amax(-1)
