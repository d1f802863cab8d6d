"""A fixed tree, the j-th child of a node holding the draft's j-th choice there. A chain is one with one child each."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwood.decode.propose.base import DraftProposer, Proposal, root_proposal
from draftwood.decode.tree import Tree

if TYPE_CHECKING:
    from draftwood.decode.propose.base import Drafter


@dataclass(frozen=True)
class _Level:
    """How the nodes of one depth come from the level above. "Inner" nodes are those with children: only they are run.

    Attributes:
        nodes: [m] the tree's nodes at this depth.
        source: [m] which inner node of the level above is the parent.
        rank: [m] which of the parent's choices the node is.
        width: choices needed of a parent.
        inner: [i] positions within `nodes` of the inner ones.
        ancestors: [1, i, total] for the inner ones: themselves and their ancestors among all inner nodes so far.
    """

    nodes: Tensor
    source: Tensor
    rank: Tensor
    width: int
    inner: Tensor
    ancestors: Tensor


def _plan(tree: Tree, device: torch.device) -> list[_Level]:
    (depth,), children = tree.depth.tolist(), tree.children()
    order: list[int] = []  # inner nodes in the order they are run, the root left out
    above = [0]
    levels = []
    for level in range(1, tree.max_depth + 1):
        nodes = [n for n in range(tree.num_nodes) if depth[n] == level]
        parent = [tree.rows[0][n] for n in nodes]
        inner = [i for i, n in enumerate(nodes) if children[n]]
        order += [nodes[i] for i in inner]
        paths = [set(tree.path(nodes[i])) for i in inner]
        levels.append(
            _Level(
                nodes=torch.tensor(nodes, device=device),
                source=torch.tensor([above.index(p) for p in parent], device=device),
                rank=torch.tensor([children[p].index(n) for p, n in zip(parent, nodes, strict=True)], device=device),
                width=max(len(children[p]) for p in parent),
                inner=torch.tensor(inner, dtype=torch.int64, device=device),
                ancestors=torch.tensor([[[n in path for n in order] for path in paths]], device=device),
            )
        )
        above = [nodes[i] for i in inner]
    return levels


class StaticProposer(DraftProposer):
    """Fills `tree` with the draft's choices, one draft forward per level below the first.

    Raises:
        ValueError: a tree of several rows, or a node with more children than the draft has tokens.
    """

    def __init__(self, draft: "Drafter", tree: Tree):
        super().__init__(draft)
        if tree.num_rows != 1:
            raise ValueError(f"expected one tree for all rows, got {tree.num_rows}: a draft fills the same one in each")
        self.tree = tree
        self._plans: dict[int, list[_Level]] = {}

    def propose(self, max_depth: int) -> Proposal:
        tree = self.tree.limited(self.bounded(max_depth))
        if tree.num_nodes == 1:
            return root_proposal(self.roots)
        if tree.max_depth not in self._plans:
            self._plans[tree.max_depth] = _plan(tree, self.roots.device)
        tokens = self.roots[:, None].repeat(1, tree.num_nodes)
        outputs = self.head_row[:, None]
        self.draft.reset_tree(self.state)
        for depth, level in enumerate(self._plans[tree.max_depth], 1):
            ids, _, _ = self._top(outputs, level.width)
            if ids.shape[-1] < level.width:
                raise ValueError(f"{tree} has a node of {level.width} children; the draft knows {ids.shape[-1]} tokens")
            chosen = ids[:, level.source, level.rank]
            tokens[:, level.nodes] = chosen
            if depth < tree.max_depth:
                parents = outputs[:, level.source[level.inner]]
                outputs = self.draft.expand(self.state, parents, chosen[:, level.inner], depth, level.ancestors)
        return Proposal(tokens, tree)
