"""Index tables of a token tree, computed once per tree and shared by every layer.

A tree is a row of parent indices: node 0 is the root, its parent is -1, and a parent comes before its children.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
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

    @classmethod
    def from_parents(cls, parents: Tensor, max_depth: int | None = None) -> "TreeTables":
        """Tables of `parents` [B, N] without a host synchronisation where `max_depth` is given.

        The ancestor relation is the transitive closure of "is parent of", by repeated squaring.
        """
        batch, nodes = parents.shape
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
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    def path_values(self, values: Tensor) -> Tensor:
        """Sum of `values` [B, N, ...] over each node and its ancestors, same shape: the cumulative decay per path."""
        batch = values.shape[0]
        flat = values.reshape(batch, self.num_nodes, -1)
        mask = self.ancestors.to(flat.dtype).expand(batch, -1, -1)
        return (mask @ flat).reshape(values.shape)
