"""A draft's tree with the paths that prompt lookup finds in it: where a text repeats itself, as code does, a small
draft knows less than the text."""

from dataclasses import dataclass, field

from torch import Tensor

from draftwood.decode.propose.base import Proposal, Proposer
from draftwood.decode.propose.beam import BeamTree
from draftwood.decode.propose.dynamic import DynamicTree
from draftwood.decode.propose.lookup import Lookup, LookupProposer
from draftwood.decode.propose.text import Branches, as_proposal
from draftwood.decode.tree import Tree


@dataclass(frozen=True)
class JoinedTree:
    """Settings.

    Attributes:
        tree: what the draft fills.
        lookup: whose paths join it; a step without a match has the draft's tree alone.
    """

    tree: Tree | DynamicTree | BeamTree
    lookup: Lookup = field(default_factory=lambda: Lookup(num_tokens=5))


class JoinedProposer:
    """The trees of `inner`, whose children must be chosen without chance, joined by the paths that lookup finds.

    Reads the tree from the device before it joins it.
    """

    def __init__(self, inner: Proposer, lookup: Lookup):
        self.inner, self.lookup = inner, LookupProposer(lookup)
        self.max_length = inner.max_length

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        self.inner.start(input_ids, lengths, features, roots)
        self.lookup.start(input_ids, lengths, features, roots)

    def propose(self, max_depth: int) -> Proposal:
        proposal = self.inner.propose(max_depth)
        found = self.lookup.paths(max_depth)
        if not any(found):
            return proposal
        tree = proposal.tree
        (tokens,) = tree.read(proposal.tokens)
        joined = []
        for b, paths in enumerate(found):
            row = Branches(tokens[b][0])
            below, places = tree.children(b), {0: 0}
            for node, children in enumerate(below):
                for child in children:
                    places[child] = row.add([tokens[b][child]], places[node])
            for path in paths:
                row.add(path)
            joined.append(row)
        return as_proposal(joined, proposal.tokens.device)

    def advance(self, tokens: Tensor, features: Tensor, paths: list[list[int]], roots: Tensor) -> None:
        self.inner.advance(tokens, features, paths, roots)
        self.lookup.advance(tokens, features, paths, roots)
