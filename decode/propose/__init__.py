"""Drafting strategies, and the one place that picks one."""

import re
from typing import TYPE_CHECKING

import torch

from draftwood.decode.propose.base import Proposal, Proposer
from draftwood.decode.propose.dynamic import DynamicProposer, DynamicTree
from draftwood.decode.propose.sampled import SampledProposer, SampledTree
from draftwood.decode.propose.static import StaticProposer
from draftwood.decode.tree import Tree, tree_preset

if TYPE_CHECKING:
    from draftwood.models.draft import EagleDraft

__all__ = ["DynamicTree", "Proposal", "Proposer", "SampledTree", "make_proposer", "resolve_tree"]

TreeSpec = Tree | DynamicTree | SampledTree | str | None


def resolve_tree(spec: TreeSpec) -> Tree | DynamicTree | SampledTree:
    """The tree a user named: a preset, `dynamic`, `dynamic-<budget>`, `sampled-<width>x<levels>`, the settings
    themselves, or None for `dynamic`.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(spec, Tree | DynamicTree | SampledTree):
        return spec
    if spec is None or spec == "dynamic":
        return DynamicTree()
    if match := re.fullmatch(r"dynamic-([1-9]\d{0,3})", spec):
        return DynamicTree.of_budget(int(match[1]))
    if match := re.fullmatch(r"sampled-([1-9]\d?)x([1-9]\d?)", spec):
        return SampledTree(width=int(match[1]), levels=int(match[2]))
    return tree_preset(spec)


def make_proposer(
    draft: "EagleDraft | Proposer | None",
    tree: TreeSpec,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Proposer | None:
    """The strategy for `draft`: none without one, itself if it is one, else the draft filling `tree`.

    Only a sampled tree heeds `temperature` and `generator`.

    Raises:
        ValueError: a sampled tree at temperature 0, or a tree that the draft cannot fill.
    """
    if draft is None or isinstance(draft, Proposer):
        return draft
    settings = resolve_tree(tree)
    if isinstance(settings, SampledTree):
        return SampledProposer(draft, settings, temperature, generator)
    return StaticProposer(draft, settings) if isinstance(settings, Tree) else DynamicProposer(draft, settings)
