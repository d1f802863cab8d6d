"""Prompt lookup: what followed the last tokens where they stood before is drafted again; no draft model.

Saxena, Prompt Lookup Decoding, 2023 (github.com/apoorvumang/prompt-lookup-decoding).
"""

from dataclasses import dataclass

from torch import Tensor

from draftwood.decode.propose.base import Proposal, root_proposal
from draftwood.decode.propose.text import Branches, TextProposer, as_proposal


@dataclass(frozen=True)
class Lookup:
    """Settings.

    Attributes:
        num_tokens: drafted after a match.
        matches: places to draft from, the latest ones first; more than one make a tree.
        max_ngram, min_ngram: last tokens that must have stood there; longer matches come first.

    Raises:
        ValueError: a setting below 1, or `min_ngram` above `max_ngram`.
    """

    num_tokens: int = 10
    matches: int = 1
    max_ngram: int = 3
    min_ngram: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"lookup: {name} is {value}; expected 1 or more")
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"lookup: min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")


class _Index:
    """Where each n-gram of one row's text has ended, in order."""

    def __init__(self, settings: Lookup):
        self.settings = settings
        self.ends: dict[tuple[int, ...], list[int]] = {}
        self.length = 0

    def extend(self, text: list[int]) -> None:
        """Reads what the text has grown by. Its last token ends no n-gram yet: nothing follows."""
        for end in range(self.length + 1, len(text)):
            for n in range(self.settings.min_ngram, min(self.settings.max_ngram, end) + 1):
                self.ends.setdefault(tuple(text[end - n : end]), []).append(end)
        self.length = max(self.length, len(text) - 1)

    def matches(self, text: list[int]) -> list[int]:
        """Places in the text after its last tokens, best first."""
        found: list[int] = []
        for n in range(min(self.settings.max_ngram, len(text)), self.settings.min_ngram - 1, -1):
            for end in reversed(self.ends.get(tuple(text[-n:]), [])):
                if len(found) == self.settings.matches:
                    return found
                if end not in found:
                    found.append(end)
        return found


class LookupProposer(TextProposer):
    """Drafts from each row's own prompt and output."""

    def __init__(self, settings: Lookup | None = None):
        self.settings = settings or Lookup()

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        super().start(input_ids, lengths, features, roots)
        self._indices = [_Index(self.settings) for _ in lengths]

    def propose(self, max_depth: int) -> Proposal:
        found = self.paths(max_depth)
        if not any(found):
            return root_proposal(self.roots)
        rows = []
        for text, paths in zip(self.texts, found, strict=True):
            branches = Branches(text[-1])
            for path in paths:
                branches.add(path)
            rows.append(branches)
        return as_proposal(rows, self.roots.device)

    def paths(self, max_depth: int) -> list[list[list[int]]]:
        """For each row the guesses below its root, the best first."""
        length = min(self.settings.num_tokens, max_depth)
        found = []
        for text, index in zip(self.texts, self._indices, strict=True):
            index.extend(text)
            found.append([text[end : end + length] for end in index.matches(text)])
        return found
