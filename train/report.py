"""The account of prepared rows: every entry of every source is kept in a split or dropped for a stated reason."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from draftwood.train.conversations import RowError

ACCOUNT_FILE = "account.json"
HISTOGRAMS = {"tokens": "tokens", "supervised": "supervised tokens", "replies": "replies"}
_MAX_BINS = 24
_QUANTILES = (0, 0.1, 0.5, 0.9, 1)
_BLOCKS = " ▁▂▃▄▅▆▇█"

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
    "not_sampled": "not chosen by the source's weight",
    "template_error": "refused by the chat template",
    "special_token_in_text": "text that holds a mark of turns",
    "not_prefix_stable": "template rewrites earlier turns",
    "boundary_in_token": "reply boundary inside a token",
    "nothing_supervised": "replies shorter than two tokens",
    "clipped_to_nothing": "no reply within max_length",
    "too_short": "fewer tokens than min_length",
    "too_long": "more tokens than max_length",
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
    """Rows in a split's folder, `repeats` of them copies of others there, with their tokens and supervised rows."""

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    repeats: int = 0


@dataclass
class Histogram:
    """Of one number per row: `counts` between `edges`, one more of these, and `quantiles` 0, 10, 50, 90, 100 %."""

    edges: list[float]
    counts: list[int]
    quantiles: list[float]
    mean: float

    @classmethod
    def of(cls, values: Sequence[int]) -> "Histogram":
        data = np.array(values or [0])
        width = max(1, -(-(int(data.max()) - int(data.min()) + 1) // _MAX_BINS))
        edges = np.arange(data.min(), data.max() + width + 1, width) - 0.5
        counts = np.histogram(data if values else [], edges)[0]
        return cls(edges.tolist(), counts.tolist(), np.quantile(data, _QUANTILES).tolist(), float(data.mean()))

    def line(self) -> str:
        """The counts as a line of at most 12 blocks."""
        step = -(-len(self.counts) // 12)
        counts = [sum(self.counts[i : i + step]) for i in range(0, len(self.counts), step)]
        return "".join(_BLOCKS[-(-count * (len(_BLOCKS) - 1) // max(1, *counts))] for count in counts)


@dataclass
class SourceAccount:
    """What became of every entry of one source: `num_rows` of them, whole or not.

    splits: kept rows by split. dropped: by reason, one per row. changes: what was done to rows that were kept.
    """

    name: str
    weight: float = 1.0
    num_rows: int = 0
    splits: dict[str, SplitCount] = field(default_factory=dict)
    dropped: dict[str, Entry] = field(default_factory=dict)
    changes: dict[str, Entry] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        return sum(split.rows - split.repeats for split in self.splits.values())

    @property
    def num_dropped(self) -> int:
        return sum(len(entry.rows) for entry in self.dropped.values())

    def drop(self, row: int, line: int | None, error: RowError) -> None:
        """Count a row as dropped."""
        entry = self.dropped.setdefault(error.reason, Entry())
        entry.times += 1
        entry.rows.append(row)
        where = f"row {row}" if line is None else f"row {row}, line {line}"
        entry.example = entry.example or f"{where}: {error.detail or ABOUT.get(error.reason, '')}"

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
            f"{self.num_kept} kept and {self.num_dropped} dropped are not the {self.num_rows} rows of {self.name}"
        )
        changed = {row for entry in self.changes.values() for row in entry.rows}
        assert changed.isdisjoint(dropped), "a dropped row counts as changed"

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "SourceAccount":
        own: dict[str, Any] = {name: raw[name] for name in ("name", "weight", "num_rows") if name in raw}
        for key, kind in (("splits", SplitCount), ("dropped", Entry), ("changes", Entry)):
            own[key] = {name: kind(**value) for name, value in raw[key].items()}
        return cls(**own)


@dataclass
class RowAccount:
    """What became of every entry of the sources.

    max_token_id: the largest id. settings: what the data were prepared with; fingerprint: of all of that. histograms:
    of `tokens`, `supervised` and `replies` of the training rows.
    """

    sources: list[SourceAccount]
    max_token_id: int = -1
    settings: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    histograms: dict[str, Histogram] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @property
    def num_kept(self) -> int:
        return sum(source.num_kept for source in self.sources)

    @property
    def num_dropped(self) -> int:
        return sum(source.num_dropped for source in self.sources)

    @property
    def splits(self) -> dict[str, SplitCount]:
        """Rows of all sources by split."""
        found: dict[str, SplitCount] = {}
        for source in self.sources:
            for name, split in source.splits.items():
                total = found.setdefault(name, SplitCount())
                for key, value in asdict(split).items():
                    setattr(total, key, getattr(total, key) + value)
        return found

    def check(self) -> None:
        """The parts add up, source by source."""
        for source in self.sources:
            source.check()

    def save(self, folder: Path) -> None:
        (folder / ACCOUNT_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "RowAccount":
        raw = json.loads((folder / ACCOUNT_FILE).read_text(encoding="utf-8"))
        # Of before there could be several sources: the one source's account is the account.
        sources = raw.get("sources") or [{**raw, "name": raw["source"]}]
        histograms = {name: Histogram(**value) for name, value in raw.get("histograms", {}).items()}
        return cls(
            [SourceAccount.parse(source) for source in sources],
            raw["max_token_id"],
            raw["settings"],
            raw["fingerprint"],
            histograms,
        )

    def __rich__(self) -> Group:
        """The account for a terminal."""
        tables = [part for source in self.sources for part in _source_tables(source)]
        if len(self.sources) > 1:
            tables.append(_total_table(self))
        if self.histograms:
            tables.append(_histogram_table(self))
        return Group(*tables)


def by_count(entries: dict[str, Entry]) -> list[tuple[str, Entry]]:
    """Reasons or changes, those of most rows first."""
    return sorted(entries.items(), key=lambda item: -len(item[1].rows))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("", *headings):
        table.add_column(heading, justify="right" if heading else "left")
    return table


def _source_tables(source: SourceAccount) -> list[Table]:
    weight = "" if source.weight == 1 else f", weight {source.weight:g}"
    rows = _table(f"Rows of {source.name}{weight}", "rows", "tokens", "supervised")
    for name, split in source.splits.items():
        rows.add_row(name, f"{split.rows - split.repeats:,}", *_sums(split))
    for reason, entry in by_count(source.dropped):
        rows.add_row(f"dropped: {ABOUT.get(reason, reason)}", f"{len(entry.rows):,}", "", "")
    rows.add_section()
    rows.add_row("in the source", f"{source.num_rows:,}", "", "")
    tables = [rows]
    if repeats := sum(split.repeats for split in source.splits.values()):
        rows.add_row("repeated by the weight, in the tokens", f"+ {repeats:,}", "", "")
    if source.changes:
        changes = _table("Changes to kept rows", "rows", "times")
        for name, entry in by_count(source.changes):
            changes.add_row(ABOUT.get(name, name), f"{len(entry.rows):,}", f"{entry.times:,}")
        tables.append(changes)
    return tables


def _total_table(account: RowAccount) -> Table:
    table = _table("All sources", "rows", "tokens", "supervised")
    for name, split in account.splits.items():
        table.add_row(f"{name}, repeats included", f"{split.rows:,}", *_sums(split))
    table.add_row("dropped", f"{account.num_dropped:,}", "", "")
    table.add_section()
    table.add_row("in the sources", f"{account.num_rows:,}", "", "")
    return table


def _histogram_table(account: RowAccount) -> Table:
    table = _table("Training rows", "least", "10 %", "half", "90 %", "most", "mean", "rows")
    for column in table.columns:
        column.no_wrap = True
    for name, histogram in account.histograms.items():
        figures = [f"{value:,.0f}" for value in histogram.quantiles]
        table.add_row(HISTOGRAMS[name], *figures, f"{histogram.mean:,.1f}", histogram.line())
    return table


def _sums(split: SplitCount) -> tuple[str, str]:
    return f"{split.tokens:,}", f"{split.supervised:,}"
