"""Drafting strategies, and the one place that picks one."""

import re
from typing import TYPE_CHECKING

from draftwood.decode.propose.base import Proposal, Proposer
from draftwood.decode.propose.dynamic import DynamicProposer, DynamicTree
from draftwood.decode.propose.static import StaticProposer
from draftwood.decode.tree import Tree, tree_preset

if TYPE_CHECKING:
    from draftwood.models.draft import EagleDraft

__all__ = ["DynamicTree", "Proposal", "Proposer", "make_proposer", "resolve_tree"]

TreeSpec = Tree | DynamicTree | str | None


def resolve_tree(spec: TreeSpec) -> Tree | DynamicTree:
    """The tree a user named: a preset, `dynamic`, `dynamic-<budget>`, the settings themselves, or None for `dynamic`.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(spec, Tree | DynamicTree):
        return spec
    if spec is None or spec == "dynamic":
        return DynamicTree()
    if match := re.fullmatch(r"dynamic-([1-9]\d{0,3})", spec):
        return DynamicTree.of_budget(int(match[1]))
    return tree_preset(spec)


def make_proposer(draft: "EagleDraft | Proposer | None", tree: TreeSpec) -> Proposer | None:
    """The strategy for `draft`: none without one, itself if it is one, else the draft filling `tree`."""
    if draft is None or isinstance(draft, Proposer):
        return draft
    settings = resolve_tree(tree)
    return StaticProposer(draft, settings) if isinstance(settings, Tree) else DynamicProposer(draft, settings)
