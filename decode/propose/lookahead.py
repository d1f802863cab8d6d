"""Lookahead decoding: the target drafts for itself (Fu et al., arXiv 2402.02057); no draft model.

Jacobi iteration guesses a window of W positions at once and corrects all guesses by every target forward. The last
N - 1 guesses of a position and the correction of the newest make an n-gram, which goes into a pool by its first token;
those that begin with the root are drafted. Both halves of the method are branches of one tree, verified in one forward:

    root - a1 - a2 - ...         the window's oldest guesses, one under the other
     |     |    |
     b0    b1   b2 ...           below the guess of each position its newer guesses, down to the last, at which the
     |     |    |                target's token is the correction
     c0    c1   c2 ...

    root - n-gram, root - n-gram, ...      from the pool

The mask of the published implementation, where a newer guess sees the oldest row up to its position and then its own
column, is the ancestor mask of this tree. A guess of the window that is right is kept like any other draft.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import cycle, islice

from torch import Tensor

from draftwood.decode.propose.base import Proposal
from draftwood.decode.propose.text import Branches, TextProposer, as_proposal


@dataclass(frozen=True)
class Lookahead:
    """Settings; about (window + pool) * (ngram - 1) nodes a tree.

    Attributes:
        window: positions guessed at once, W.
        ngram: tokens of an n-gram, its first included, N.
        pool: n-grams kept for a first token, and drafted at most, G.

    Raises:
        ValueError: an n-gram of one token, or a setting below 1.
    """

    window: int = 7
    ngram: int = 5
    pool: int = 7

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 2 if name == "ngram" else 1
            if value < least:
                raise ValueError(f"lookahead: {name} is {value}; expected {least} or more")


@dataclass
class _Row:
    """One row's `levels` of guesses, oldest first, `window` tokens each, and its pool.

    `ends`: for each position the node of its newest guess in the last tree; [] where that tree had no window.
    """

    levels: list[list[int]]
    pool: dict[int, "OrderedDict[tuple[int, ...], None]"] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    def learn(self, corrected: list[int], settings: Lookahead) -> None:
        """Takes the target's tokens at `ends` in."""
        self.levels.append(corrected)
        if len(self.levels) < settings.ngram:  # the first steps of a text fill the window
            return
        for first, *rest in zip(*self.levels, strict=True):
            ngrams = self.pool.setdefault(first, OrderedDict())
            ngrams[tuple(rest)] = None
            ngrams.move_to_end(tuple(rest))
            if len(ngrams) > settings.pool:
                ngrams.popitem(last=False)
        del self.levels[0]


class LookaheadProposer(TextProposer):
    """Chooses without chance, whatever the temperature: guesses and corrections are the target's likeliest tokens."""

    def __init__(self, settings: Lookahead | None = None):
        self.settings = settings or Lookahead()

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        super().start(input_ids, lengths, features, roots)
        self._rows = [_Row([list(islice(cycle(text), self.settings.window))]) for text in self.texts]

    def propose(self, max_depth: int) -> Proposal:
        made = []
        for text, row in zip(self.texts, self._rows, strict=True):
            branches = Branches(text[-1])
            for ngram in reversed(row.pool.get(text[-1], [])):
                branches.add(ngram[:max_depth])
            row.levels[0][0] = text[-1]
            row.ends = []
            # At the end of a text there is no room for the window, nor time for what it would find.
            if self.settings.window - 1 + len(row.levels) - 1 <= max_depth:
                row.ends = _hang_window(branches, row.levels)
            made.append(branches)
        return as_proposal(made, self.roots.device)

    def read_logits(self, logits: Tensor) -> None:
        choices = logits.argmax(-1).tolist()
        for row, chosen in zip(self._rows, choices, strict=True):
            if row.ends:
                row.learn([chosen[node] for node in row.ends], self.settings)
                row.ends = []


def _hang_window(branches: Branches, levels: list[list[int]]) -> list[int]:
    """Adds the window's branches; returns the last node of each position."""
    first, *newer = levels
    node, ends = 0, []
    for position, token in enumerate(first):
        if position > 0:
            node = branches.add([token], below=node)
        ends.append(branches.add([level[position] for level in newer], below=node))
    return ends
