"""First questions of conversations about code or numbers, for a target to answer itself.

    python scripts/pick_questions.py sharegpt runs/topics.jsonl --skip 1200
    draftwood regenerate smollm2-hybrid runs/topics.jsonl --out runs/own-topics.jsonl

A draft sees little of either in a general mix of short conversations, and both are what people benchmark with.
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

# Numbers first: a question that is about both counts as one about numbers, of which there are fewer.
TOPICS = {
    "numbers": re.compile(r"\b(how many|how much|calculate|solve|equation|percent|total)\b", re.IGNORECASE),
    "code": re.compile(r"\b(python|function|javascript|code|class|sql|script)\b", re.IGNORECASE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="as --source of `draftwood prepare`")
    parser.add_argument("out", type=Path, help="JSON Lines file")
    parser.add_argument("--skip", type=int, default=0, help="entries of the source that are left alone")
    parser.add_argument("--limit", type=int, default=500, help="questions of each topic; default: %(default)s")
    parser.add_argument("--max-characters", type=int, default=1000, help="of a question; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the choice among more than --limit")
    asked = parser.parse_args()
    found: dict[str, dict[str, str]] = {name: {} for name in TOPICS}
    for question, source_id in first_questions(asked.source, asked.skip):
        name = next((name for name, pattern in TOPICS.items() if pattern.search(question)), None)
        if name is not None and len(question) < asked.max_characters:
            found[name].setdefault(question, source_id)
    draw = random.Random(asked.seed)
    lines = []
    for name, questions in found.items():
        chosen = draw.sample(sorted(questions), min(asked.limit, len(questions)))
        turns = [[{"from": "human", "value": question}] for question in chosen]
        lines += [
            {"id": questions[q], "conversations": turn, "topic": name} for q, turn in zip(chosen, turns, strict=True)
        ]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    print(f"{asked.out}: {len(lines)} questions")


def first_questions(source: str, skip: int) -> Iterator[tuple[str, str]]:
    """The text of each conversation's first user turn, and the conversation's id; unreadable entries have none."""
    policy = TurnPolicy()
    for one in open_sources(source):
        for row in islice(one.rows(), skip, None):
            try:
                turns = [] if row.error is not None else parse_turns(row.value)
            except RowError:
                continue
            question = next((text for role, text in turns if policy.kind(role) == "user" and text.strip()), None)
            if question is not None:
                yield question, row.source_id


if __name__ == "__main__":
    main()
