"""Token trees: what a draft proposes and a target verifies.

Node 0 is the root, the last emitted token, which is not yet in the target's state; a parent comes before its children.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import islice

import torch
from torch import Tensor

from draftwood.kernels.tables import TreeTables
from draftwood.models.transfer import send


class Tree:
    """One tree for all rows of a batch, or one per row.

    Attributes:
        parents: [R, n] int64, -1 for the root; R is 1 (shared) or the batch size. On the CPU, or on the device where
            a draft grew the tree.
        valid: [R, n] bool on the CPU, false on the padding of rows with fewer nodes. Padding hangs on the root, has no
            children and is never on a path.
        is_padded: whether there is any.
    """

    def __init__(
        self,
        parents: Tensor,
        valid: Tensor | None = None,
        max_depth: int | None = None,
        rows: list[list[int]] | None = None,
    ):
        self.parents = parents
        self.valid = torch.ones(parents.shape, dtype=torch.bool) if valid is None else valid
        if max_depth is not None:  # known without asking the device; may be more than the true depth
            self.__dict__["max_depth"] = max_depth
        self.is_padded = valid is not None and not bool(valid.all())
        self._rows = rows
        self._tables: dict[torch.device, TreeTables] = {}
        self._links: dict[torch.device, Tensor] = {}
        self._limited: dict[int, Tree] = {}

    @classmethod
    def from_parents(cls, parents: Sequence[int] | Sequence[Sequence[int]]) -> "Tree":
        """A tree from parent indices, or one tree per row from a list of them (shorter ones are padded).

        Raises:
            ValueError: the row and node at fault: no nodes, a root that is not node 0, or a parent that does not
                come before its child.
        """
        nested = len(parents) > 0 and not isinstance(parents[0], int)
        rows: list[list[int]] = [list(p) for p in parents] if nested else [list(parents)]  # type: ignore[arg-type]
        for r, row in enumerate(rows):
            where = f"tree of row {r}: " if nested else "tree: "
            if not row or row[0] != -1:
                raise ValueError(f"{where}node 0 is the root and has parent -1, got {row[:1]}")
            for node, parent in enumerate(row[1:], 1):
                if not 0 <= parent < node:
                    raise ValueError(f"{where}node {node} has parent {parent}; expected a node from 0 to {node - 1}")
        size = max(map(len, rows))
        padded = [row + [0] * (size - len(row)) for row in rows]
        valid = [[node < len(row) for node in range(size)] for row in rows]
        return cls(torch.tensor(padded), torch.tensor(valid), rows=padded)

    @classmethod
    def chain(cls, num_drafts: int) -> "Tree":
        """The root and `num_drafts` nodes below it, one under the other."""
        return cls.from_parents(range(-1, num_drafts))

    @property
    def num_rows(self) -> int:
        return self.parents.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def rows(self) -> list[list[int]]:
        """Parent indices as plain lists, padding included."""
        if self._rows is None:
            self._rows = self.parents.tolist()
        return self._rows

    def read(self, *tensors: Tensor) -> list[list[list[int]]]:
        """`tensors`, [.., k] int64 of one device, as lists, in one transfer; `rows` come with it if not known yet."""
        wanted = [*tensors] if self._rows is not None else [*tensors, self.parents.to(tensors[0].device)]
        flat = iter(torch.cat([tensor.flatten() for tensor in wanted]).tolist())
        lists = [[list(islice(flat, tensor.shape[1])) for _ in range(tensor.shape[0])] for tensor in wanted]
        if self._rows is None:
            self._rows = lists.pop()
        return lists

    @cached_property
    def depth(self) -> Tensor:
        """[R, n] int64 on the CPU, 0 for the root."""
        depths = []
        for row in self.rows:
            row_depth = [0] * len(row)
            for node, parent in enumerate(row[1:], 1):
                row_depth[node] = row_depth[parent] + 1
            depths.append(row_depth)
        return torch.tensor(depths)

    @cached_property
    def max_depth(self) -> int:
        return int(self.depth.max())

    def tables(self, device: torch.device | str = "cpu") -> TreeTables:
        """Index tables on `device`, made once per tree."""
        device = torch.device(device)
        if device not in self._tables:
            self._tables[device] = TreeTables.from_parents(send(self.parents, device), self.max_depth)
        return self._tables[device]

    def links(self, device: torch.device | str = "cpu") -> Tensor:
        """[R, n] int64: `parents` on `device`, with -2 on padding, so that a padding node is nobody's child."""
        device = torch.device(device)
        if device not in self._links:
            links = send(self.parents, device)
            self._links[device] = links.masked_fill(~send(self.valid, device), -2) if self.is_padded else links
        return self._links[device]

    def children(self, row: int = 0) -> list[list[int]]:
        """For each node its children, in node order; padding is left out."""
        below: list[list[int]] = [[] for _ in range(self.num_nodes)]
        r = row if self.num_rows > 1 else 0
        valid = self.valid[r].tolist() if self.is_padded else [True] * self.num_nodes
        for node, parent in enumerate(self.rows[r]):
            if parent >= 0 and valid[node]:
                below[parent].append(node)
        return below

    def path(self, node: int, row: int = 0) -> list[int]:
        """Nodes from the root down to `node`, both included."""
        parents = self.rows[row if self.num_rows > 1 else 0]
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        return path[::-1]

    def limited(self, max_depth: int) -> "Tree":
        """The tree without the nodes below `max_depth`; itself where there are none. For a tree shared by all rows."""
        if max_depth >= self.max_depth:
            return self
        if max_depth not in self._limited:
            (row,), (depth,) = self.rows, self.depth.tolist()
            kept = [node for node in range(len(row)) if depth[node] <= max_depth]
            place = {node: i for i, node in enumerate(kept)} | {-1: -1}
            self._limited[max_depth] = Tree.from_parents([place[row[node]] for node in kept])
        return self._limited[max_depth]

    def __repr__(self) -> str:
        return f"Tree({self.num_rows} x {self.num_nodes} nodes, depth {self.max_depth})"


@cache
def root_tree() -> Tree:
    """The tree of the root alone, one object, so that its tables are made once."""
    return Tree.chain(0)
