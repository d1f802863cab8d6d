"""First questions of conversations, those about code or numbers set apart, for a target to answer itself.

    python scripts/pick_questions.py sharegpt runs/topics.jsonl --skip 1200
    draftwood regenerate smollm2-hybrid runs/topics.jsonl --out runs/own-topics.jsonl

A draft sees little of code and numbers in a general mix of conversations, and both are what people benchmark with.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from draftwood.train.conversations import RowError, parse_turns
from draftwood.train.sources import open_sources
from draftwood.train.turns import TurnPolicy

# The first that fits: a question about numbers and code counts as one about numbers, of which there are fewer.
TOPICS = {
    "numbers": re.compile(r"\b(how many|how much|calculate|solve|equation|percent|total)\b", re.IGNORECASE),
    "code": re.compile(r"\b(python|function|javascript|code|class|sql|script)\b", re.IGNORECASE),
    "other": re.compile(""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="as --source of `draftwood prepare`")
    parser.add_argument("out", type=Path, help="JSON Lines file")
    parser.add_argument("--skip", type=int, default=0, help="entries of the source that are left alone")
    parser.add_argument(
        "--topics", nargs="+", choices=TOPICS, default=["numbers", "code"], help="default: numbers code"
    )
    parser.add_argument("--limit", type=int, default=500, help="questions of each topic; default: %(default)s")
    parser.add_argument("--max-characters", type=int, default=1000, help="of a question; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the choice among more than --limit")
    asked = parser.parse_args()
    found: dict[str, dict[str, str]] = {name: {} for name in asked.topics}
    unreadable: list[str] = []
    try:
        questions = list(first_questions(asked.source, asked.skip, unreadable))
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    for question, source_id in questions:
        name = next(name for name, pattern in TOPICS.items() if pattern.search(question))
        if name in found and len(question) < asked.max_characters:
            found[name].setdefault(question, source_id)
    draw = random.Random(asked.seed)
    lines = []
    for name, of_topic in found.items():
        chosen = draw.sample(sorted(of_topic), min(asked.limit, len(of_topic)))
        turns = [[{"from": "human", "value": question}] for question in chosen]
        lines += [
            {"id": of_topic[q], "conversations": turn, "topic": name} for q, turn in zip(chosen, turns, strict=True)
        ]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    left = f"; {len(unreadable)} entries could not be read, the first: {unreadable[0]}" if unreadable else ""
    print(f"{asked.out}: {len(lines)} questions of {len(questions)} conversations{left}")


def first_questions(source: str, skip: int, unreadable: list[str]) -> Iterator[tuple[str, str]]:
    """The text of each conversation's first user turn, and the conversation's id; what is `unreadable` is noted."""
    policy = TurnPolicy()
    for one in open_sources(source):
        for row in islice(one.rows(), skip, None):
            try:
                if row.error is not None:
                    raise row.error
                turns = parse_turns(row.value)
            except RowError as error:
                unreadable.append(f"entry {row.number}: {error}")
                continue
            question = next((text for role, text in turns if policy.kind(role) == "user" and text.strip()), None)
            if question is not None:
                yield question, row.source_id


if __name__ == "__main__":
    main()
