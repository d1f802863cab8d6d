"""Conversations as something to be answered: the user's turns, without the assistant's."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from draftwood.train.conversations import RowError, parse_turns
from draftwood.train.fingerprint import text_sha256
from draftwood.train.sources import Source, copies
from draftwood.train.turns import Message, TurnPolicy, normalise_turns

# Batches whose conversations are sorted by length together; more would only make padding smaller.
BATCHES_TOGETHER = 16


@dataclass
class Talk:
    """A conversation being answered: `messages` so far, and the user's turns that are still to come."""

    source: str
    number: int
    source_id: str
    messages: list[Message]
    turns: list[str]
    stopped: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.source, self.number

    @property
    def is_active(self) -> bool:
        return bool(self.turns) and self.stopped is None

    def line(self) -> dict[str, Any]:
        """As ShareGPT has it."""
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        turns = [{"from": names[message["role"]], "value": message["content"]} for message in self.messages]
        own = {"source": self.source, "source_row": self.number, "stopped": self.stopped}
        return {"id": self.source_id, "conversations": turns, **own}


def read_talks(
    sources: list[Source], policy: TurnPolicy, limit: int | None, seed: int, dropped: Counter[str]
) -> Iterator[Talk]:
    """Every conversation of the sources that has something to ask; the others are counted in `dropped`, by reason.

    Args:
        limit: only the first so many entries of each source.
        seed: of the choice by weight.
    """
    seen: set[str] = set()
    for source in sources:
        for row in islice(source.rows(), limit):
            try:
                if row.error is not None:
                    raise row.error
                messages = _prompts(parse_turns(row.value), policy)
                digest = text_sha256(json.dumps(messages))
                if not copies(digest, source.weight, seed):
                    raise RowError("not_sampled")
                if digest in seen and policy.duplicates == "drop":
                    raise RowError("duplicate")
                seen.add(digest)
            except RowError as error:
                dropped[error.reason] += 1
                continue
            system = [message for message in messages if message["role"] == "system"]
            turns = [message["content"] for message in messages if message["role"] == "user"]
            yield Talk(source.name, row.number, row.source_id, system, turns)


def _prompts(turns: list[tuple[str, str]], policy: TurnPolicy) -> list[Message]:
    """The messages of a conversation without the assistant's; a last question that nobody answered is one of them."""
    # What the assistant said does not matter, not even that it said nothing.
    spoken = [(role, "an answer" if policy.kind(role) == "assistant" else text) for role, text in turns]
    spoken = [(role, text) for role, text in spoken if text.strip()]
    if policy.unknown_role == "cut":
        unknown = (i for i, (role, _) in enumerate(spoken) if policy.kind(role) is None)
        spoken = spoken[: next(unknown, len(spoken))]
    if spoken and policy.kind(spoken[-1][0]) == "user":
        spoken.append((policy.assistant_roles[0], "an answer"))
    messages, _ = normalise_turns(spoken, policy)
    return [message for message in messages if message["role"] != "assistant"]


def batches(talks: Iterator[Talk], size: int) -> Iterator[list[Talk]]:
    """Talks of as many turns and similar lengths together, the same ones in every run."""
    while window := list(islice(talks, size * BATCHES_TOGETHER)):
        window.sort(key=lambda talk: (len(talk.turns), len(talk.turns[0]), talk.key))
        yield from (window[i : i + size] for i in range(0, len(window), size))
