"""The account of a prepared data set: every entry of the source is kept in a split or dropped for a stated reason."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from draftwood.train.conversations import RowError

ACCOUNT_FILE = "account.json"

ABOUT = {
    "not_json": "not JSON",
    "not_an_object": "not an object",
    "cut_off": "cut off by the end of the file",
    "no_turns": "no list of turns",
    "bad_turn": "a turn without role and text",
    "value_not_text": "a turn whose text is null or not text",
    "not_unicode": "text that can't be encoded",
    "empty": "no turns",
    "unknown_role": "an unknown role",
    "no_reply": "no reply to a user",
    "duplicate": "word for word an earlier row",
    "template_error": "refused by the chat template",
    "special_token_in_text": "text that holds a mark of turns",
    "not_prefix_stable": "template rewrites earlier turns",
    "boundary_in_token": "reply boundary inside a token",
    "nothing_supervised": "replies shorter than two tokens",
    "clipped_to_nothing": "no reply within max_length",
    "blank_turn_dropped": "blank turn dropped",
    "leading_reply_dropped": "reply before the first user turn dropped",
    "unknown_role_cut": "cut before a turn of an unknown role",
    "unknown_role_dropped": "turn of an unknown role dropped",
    "same_role_merged": "turns of one role in a row merged",
    "same_role_cut": "cut between two turns of one role",
    "system_folded": "system text folded into a user turn",
    "system_dropped": "system text dropped",
    "unanswered_turn_dropped": "last user turn without a reply dropped",
    "last_reply_only": "last reply alone supervised",
    "clipped": "clipped to max_length",
}


@dataclass
class Entry:
    """Rows (numbers from 1) that something happened to, how often in all, and the first case in words."""

    times: int = 0
    rows: list[int] = field(default_factory=list)
    example: str = ""


@dataclass
class SplitCount:
    rows: int = 0
    tokens: int = 0
    supervised: int = 0


@dataclass
class RowAccount:
    """What became of every entry of `source`.

    num_rows: entries of the source, whole or not. splits: kept rows by split, their tokens and supervised draft rows.
    dropped: by reason, one per row. changes: what was done to rows that were kept. max_token_id: the largest id.
    settings: what the data were prepared with; fingerprint: of all of that.
    """

    source: str
    num_rows: int = 0
    splits: dict[str, SplitCount] = field(default_factory=dict)
    dropped: dict[str, Entry] = field(default_factory=dict)
    changes: dict[str, Entry] = field(default_factory=dict)
    max_token_id: int = -1
    settings: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""

    @property
    def num_kept(self) -> int:
        return sum(split.rows for split in self.splits.values())

    @property
    def num_dropped(self) -> int:
        return sum(len(entry.rows) for entry in self.dropped.values())

    def drop(self, row: int, line: int, error: RowError) -> None:
        """Count a row as dropped."""
        entry = self.dropped.setdefault(error.reason, Entry())
        entry.times += 1
        entry.rows.append(row)
        entry.example = entry.example or f"row {row}, line {line}: {error.detail or ABOUT.get(error.reason, '')}"

    def change(self, row: int, changes: Counter[str]) -> None:
        """Count what was done to a row that is kept."""
        for name, times in changes.items():
            entry = self.changes.setdefault(name, Entry())
            entry.times += times
            entry.rows.append(row)

    def check(self) -> None:
        """The parts add up: every row from 1 to `num_rows` is kept once or dropped once."""
        dropped = [row for entry in self.dropped.values() for row in entry.rows]
        assert len(set(dropped)) == len(dropped), "a row is dropped twice"
        assert all(1 <= row <= self.num_rows for row in dropped), "a row that is not in the source is dropped"
        assert self.num_kept + self.num_dropped == self.num_rows, (
            f"{self.num_kept} kept and {self.num_dropped} dropped are not the {self.num_rows} rows of {self.source}"
        )
        changed = {row for entry in self.changes.values() for row in entry.rows}
        assert changed.isdisjoint(dropped), "a dropped row counts as changed"

    def save(self, folder: Path) -> None:
        (folder / ACCOUNT_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "RowAccount":
        raw = json.loads((folder / ACCOUNT_FILE).read_text(encoding="utf-8"))
        for key, kind in (("splits", SplitCount), ("dropped", Entry), ("changes", Entry)):
            raw[key] = {name: kind(**value) for name, value in raw[key].items()}
        return cls(**raw)

    def __rich__(self) -> Group:
        """The account for a terminal."""
        rows = Table(title=f"Rows of {self.source}", title_justify="left")
        for heading in ("", "rows", "tokens", "supervised"):
            rows.add_column(heading, justify="left" if not heading else "right")
        for name, split in self.splits.items():
            rows.add_row(name, f"{split.rows:,}", f"{split.tokens:,}", f"{split.supervised:,}")
        for reason, entry in sorted(self.dropped.items(), key=lambda item: -len(item[1].rows)):
            rows.add_row(f"dropped: {ABOUT.get(reason, reason)}", f"{len(entry.rows):,}", "", "")
        rows.add_section()
        rows.add_row("in the source", f"{self.num_rows:,}", "", "")
        if not self.changes:
            return Group(rows)
        changes = Table(title="Changes to kept rows", title_justify="left")
        for heading in ("", "rows", "times"):
            changes.add_column(heading, justify="left" if not heading else "right")
        for name, entry in sorted(self.changes.items(), key=lambda item: -len(item[1].rows)):
            changes.add_row(ABOUT.get(name, name), f"{len(entry.rows):,}", f"{entry.times:,}")
        return Group(rows, changes)
