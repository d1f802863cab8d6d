"""Drafting strategies, and the one place that picks one."""

import difflib
import re

import torch

from draftwood.decode.propose.adaptive import follow
from draftwood.decode.propose.base import Drafter, Proposal, Proposer
from draftwood.decode.propose.beam import BeamProposer, BeamTree
from draftwood.decode.propose.dynamic import DynamicProposer, DynamicTree
from draftwood.decode.propose.joined import JoinedProposer, JoinedTree
from draftwood.decode.propose.lookahead import Lookahead, LookaheadProposer
from draftwood.decode.propose.lookup import Lookup, LookupProposer
from draftwood.decode.propose.plan import Plan
from draftwood.decode.propose.sampled import SampledProposer, SampledTree, check_temperature
from draftwood.decode.propose.static import StaticProposer
from draftwood.decode.tree import PRESETS, Tree, tree_preset

__all__ = [
    "FORMS",
    "BeamTree",
    "DynamicTree",
    "JoinedTree",
    "Lookahead",
    "Lookup",
    "Plan",
    "Proposal",
    "Proposer",
    "SampledTree",
    "check_temperature",
    "make_proposer",
    "resolve_tree",
]

Settings = Tree | DynamicTree | BeamTree | JoinedTree | SampledTree | Lookup | Lookahead
TreeSpec = Settings | Plan | str | None

# How each is named; <..> are numbers, and a name without them takes the default settings.
FORMS = (
    "chain-<k>",
    "product-<k>x<k>x...",
    *PRESETS,
    "dynamic, dynamic-<nodes>",
    "beam-<beams>x<levels>",
    "sampled-<children>x<levels>, sampled-<children>-<children>-...",
    "lookup, lookup-<tokens>, lookup-<tokens>x<matches>",
    "lookahead, lookahead-<window>x<ngram>x<pool>",
    "<a tree that is not sampled>+lookup, also with lookup's numbers",
)
_NUMBER = r"([1-9]\d{0,3})"


def resolve_tree(spec: TreeSpec) -> Settings:
    """The tree, or the strategy that makes one, that a user named: one of `FORMS`, the settings themselves, or None for
    `dynamic`.

    Raises:
        ValueError: an unknown name; the message has the nearest one and all forms.
    """
    if isinstance(spec, Settings):
        return spec
    if isinstance(spec, Plan):
        return spec.tree
    if spec is None or spec == "dynamic":
        return DynamicTree()
    if "+" in spec:
        return _joined(spec)
    if match := re.fullmatch(rf"dynamic-{_NUMBER}", spec):
        return DynamicTree.of_budget(int(match[1]))
    if match := re.fullmatch(rf"beam-{_NUMBER}x{_NUMBER}", spec):
        return BeamTree(beams=int(match[1]), levels=int(match[2]))
    if match := re.fullmatch(rf"sampled-{_NUMBER}x{_NUMBER}", spec):
        return SampledTree((int(match[1]),) * int(match[2]))
    if match := re.fullmatch(rf"sampled((?:-{_NUMBER}){{2,16}})", spec):
        return SampledTree(tuple(map(int, match[1].removeprefix("-").split("-"))))
    if match := re.fullmatch(rf"lookup(?:-{_NUMBER}(?:x{_NUMBER})?)?", spec):
        return Lookup(num_tokens=int(match[1] or Lookup.num_tokens), matches=int(match[2] or Lookup.matches))
    if spec == "lookahead":
        return Lookahead()
    if match := re.fullmatch(rf"lookahead-{_NUMBER}x{_NUMBER}x{_NUMBER}", spec):
        return Lookahead(*map(int, match.groups()))
    if (tree := tree_preset(spec)) is not None:
        return tree
    known = [
        *PRESETS,
        "chain-4",
        "product-4x2",
        "dynamic",
        "dynamic-16",
        "beam-3x4",
        "sampled-3x4",
        "lookup",
        "lookahead",
        "dynamic-16+lookup",
    ]
    near = difflib.get_close_matches(spec, known, 1, 0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ";"
    if any(not 1 <= int(number) <= 9999 for number in re.findall(r"\d+", spec)):
        hint = "; its numbers are from 1 to 9999."
    raise ValueError(f"no tree '{spec}'{hint} Known: {'; '.join(FORMS)}")


def _joined(spec: str) -> JoinedTree:
    parts = spec.split("+")
    if parts[0] == "plan":
        raise ValueError(f"no tree '{spec}'; a plan brings lookup where that pays: say 'plan'")
    if len(parts) == 2 and all(parts):
        tree, lookup = map(resolve_tree, parts)
        if isinstance(tree, Tree | DynamicTree | BeamTree) and isinstance(lookup, Lookup):
            return JoinedTree(tree) if parts[1] == "lookup" else JoinedTree(tree, lookup)
    raise ValueError(f"no tree '{spec}'; expected one that is not sampled and +lookup, as dynamic-16+lookup")


def make_proposer(
    draft: "Drafter | Proposer | None",
    tree: TreeSpec,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Proposer | None:
    """The strategy for `draft` and `tree`: `draft` itself if it is one, else the draft filling `tree`.

    Lookup and lookahead need no draft and use none; with any other tree and no draft there is no strategy: None.
    Only a sampled tree heeds `temperature` and `generator`.

    Raises:
        ValueError: a sampled tree at temperature 0, or a tree that the draft cannot fill.
    """
    if isinstance(draft, Proposer):
        return draft
    if isinstance(tree, Plan):
        return follow(tree, make_proposer(draft, tree.tree, temperature, generator))
    settings = resolve_tree(tree)
    if isinstance(settings, JoinedTree):
        inner = make_proposer(draft, settings.tree)
        return None if inner is None else JoinedProposer(inner, settings.lookup)
    if isinstance(settings, Lookup):
        return LookupProposer(settings)
    if isinstance(settings, Lookahead):
        return LookaheadProposer(settings)
    if draft is None:
        return None
    if isinstance(settings, SampledTree):
        return SampledProposer(draft, settings, temperature, generator)
    if isinstance(settings, BeamTree):
        return BeamProposer(draft, settings)
    return StaticProposer(draft, settings) if isinstance(settings, Tree) else DynamicProposer(draft, settings)
