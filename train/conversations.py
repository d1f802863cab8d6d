"""Conversations from a file, row by row: a damaged row is reported and the rest is read.

Two shapes of row are understood, in a JSON array or in JSON Lines:

    {"id": ..., "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"id": ..., "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

`read_rows` yields every row of the file, whole or not; `parse_turns` takes the turns out of one. What is then done with
odd turns is `train/turns.py`. Other kinds of source are in `train/sources.py`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

BLOCK_CHARS = 1 << 23
TURN_KEYS = ("conversations", "messages")

# A string that closes on its line, else a bare quote; the possessive `++` keeps a long string linear.
_STRUCTURE = re.compile(r'"(?:[^"\\\n]++|\\.)*+"|["{}\[\]]', re.DOTALL)
_ROW_START = re.compile(r'[\[,\n]\s*(?=\{\s*")')
_CLOSING = {"{": "}", "[": "]"}
_SEPARATORS = re.compile(r"[\s,]*")
_decoder = json.JSONDecoder()


class RowError(ValueError):
    """A row that can't be used. `reason` is a short code that the account counts by, `detail` says what was found."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type["RowError"], tuple[str, str]]:
        return RowError, (self.reason, self.detail)


@dataclass(frozen=True)
class SourceRow:
    """One entry of a source. Exactly one of `value` and `error` is set.

    number: 1 for the first entry; in JSON Lines blank lines are no entries. line: where it starts, from 1; None in a
        table.
    """

    number: int
    line: int | None
    value: Any = None
    error: RowError | None = None

    @property
    def source_id(self) -> str:
        """The row's own id as text that can be encoded, "" if it has none."""
        found = self.value.get("id")
        return "" if found is None else str(found).encode(errors="backslashreplace").decode()


def read_rows(path: str | Path) -> Iterator[SourceRow]:
    """Every entry of a JSON array or JSON Lines file, in order, in memory one block at a time.

    Errors of a row: `not_json` (and reading goes on at the next row that can be recognised), `not_an_object`,
    `cut_off` (the file ends within this row or before the closing bracket).

    Raises:
        ValueError: the file is empty, or holds neither an array nor objects.
    """
    path = Path(path)
    # Bytes that are no UTF-8 become lone surrogates, which `parse_turns` refuses in the row they are in.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        file.seek(0)
        if start == "{" or (start and path.suffix == ".jsonl"):
            yield from _read_lines(file)
        elif start == "[":
            yield from _ArrayReader(file).rows()
        else:
            found = f"starts with {start!r}" if start else "is empty"
            raise ValueError(f"{path} {found}: expected a JSON array or JSON Lines of conversations")


def parse_turns(value: Any) -> list[tuple[str, str]]:
    """The turns of one row as (role as written, text).

    Raises:
        RowError: `not_an_object`, `no_turns` (no list under a known key), `bad_turn` (a turn without role and text
            keys), `value_not_text` (null, a list, a number), `not_unicode` (text that can't be encoded).
    """
    if not isinstance(value, dict):
        raise RowError("not_an_object", f"the row is {_kind(value)}")
    # A table has every column in every row: those of other rows are null.
    found = [key for key in TURN_KEYS if value.get(key) is not None]
    if not found:
        keys = f"{list(value)[:9]}{', and more' if len(value) > 9 else ''}"
        raise RowError("no_turns", f"expected a list under one of {', '.join(TURN_KEYS)}; the keys are {keys}")
    turns = value[found[0]]
    if not isinstance(turns, list):
        raise RowError("no_turns", f"expected a list under {found[0]}, found {_kind(turns)}")
    return [_parse_turn(turn, position) for position, turn in enumerate(turns, start=1)]


def _parse_turn(turn: Any, position: int) -> tuple[str, str]:
    pairs = [
        (turn[role_key], turn[text_key])
        for role_key, text_key in (("from", "value"), ("role", "content"))
        if isinstance(turn, dict) and role_key in turn and text_key in turn
    ]
    if not pairs:
        found = f"the keys {list(turn)[:9]}" if isinstance(turn, dict) else _kind(turn)
        raise RowError("bad_turn", f"turn {position} has {found}, expected from and value, or role and content")
    role, text = next((pair for pair in pairs if pair[0] is not None), pairs[0])
    if not isinstance(role, str):
        raise RowError("bad_turn", f"the role of turn {position} is {_kind(role)}")
    if not isinstance(text, str):
        raise RowError("value_not_text", f"the text of turn {position} is {_kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError("not_unicode", f"turn {position} has {text[error.start]!a} at character {error.start}") from None
    return role, text


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        int: "a number",
        float: "a number",
        str: "a text",
        bool: "true or false",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _read_lines(file: TextIO) -> Iterator[SourceRow]:
    number = 0
    for line_number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        number += 1
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = "not_json" if line.endswith("\n") else "cut_off"
            yield SourceRow(number, line_number, error=RowError(reason, _describe(error, line_number)))
        else:
            yield _whole(number, line_number, value)


def _describe(error: Exception, line: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in line {line + error.lineno - 1}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]


def _whole(number: int, line: int, value: Any) -> SourceRow:
    if isinstance(value, dict):
        return SourceRow(number, line, value)
    return SourceRow(number, line, error=RowError("not_an_object", f"the row is {_kind(value)}"))


class _ArrayReader:
    """Rows of a JSON array. `text` is what has been read and not yet used up before `at`."""

    def __init__(self, file: TextIO):
        self.file = file
        self.text = ""
        self.at = 0
        self.line = 1

    def rows(self) -> Iterator[SourceRow]:
        self._more()
        self._advance(self.text.index("[") + 1)
        number = 0
        while True:
            self._skip_separators()
            if self.text.startswith("]", self.at):
                self._advance(self.at + 1)
                self._skip_separators()
                if self.at < len(self.text):
                    yield SourceRow(number + 1, self.line, error=RowError("not_json", "text after the closing bracket"))
                return
            number += 1
            line = self.line
            if self.at == len(self.text):
                yield SourceRow(number, line, error=RowError("cut_off", "the file ends before the closing bracket"))
                return
            value, error = self._next_value()
            yield _whole(number, line, value) if error is None else SourceRow(number, line, error=error)
            if error is not None and error.reason == "cut_off":
                return

    def _next_value(self) -> tuple[Any, RowError | None]:
        while True:
            try:
                value, end = _decoder.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as caught:
                row_end = _end_of_row(self.text, self.at)
                # The decoder counts lines from the start of the text it was given.
                detail = _describe(caught, self.line - self.text.count("\n", 0, self.at))
                if row_end is None and self._more():
                    continue
                if row_end:
                    # A bracket lost here and one too many further on balance out over the whole rows between.
                    found = self._find_row(row_end)
                    self._advance(row_end if found is None else found)
                    return None, RowError("not_json", detail)
                return None, self._resume(detail)
            # `12` at the end of a block may go on as `123`; only brackets close themselves.
            if end == len(self.text) and self.text[self.at] not in "{[" and self._more():
                continue
            self._advance(end)
            return value, None

    def _resume(self, detail: str) -> RowError:
        """Go on at the next row, however far it is."""
        while True:
            if (found := self._find_row(len(self.text))) is not None:
                self._advance(found)
                return RowError("not_json", detail)
            if not self._more():
                lost = len(self.text) - self.at
                return RowError("cut_off", f"the last {lost} characters of the file are no whole row: {detail}")

    def _find_row(self, limit: int) -> int | None:
        """Where the next thing starts that is a row for sure: an object of its own that has turns."""
        for match in _ROW_START.finditer(self.text, self.at + 1, limit):
            try:
                value, _ = _decoder.raw_decode(self.text, match.end())
            except (ValueError, RecursionError):
                continue
            if any(key in value for key in TURN_KEYS):
                return match.end()
        return None

    def _more(self) -> bool:
        # Reading at least as much as is held keeps retries on a very long row linear in its length.
        block = self.file.read(max(BLOCK_CHARS, len(self.text) - self.at))
        self.text = self.text[self.at :] + block
        self.at = 0
        return bool(block)

    def _advance(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def _skip_separators(self) -> None:
        while True:
            match = _SEPARATORS.match(self.text, self.at)
            assert match is not None
            self._advance(match.end())
            if self.at < len(self.text) or not self._more():
                return


def _end_of_row(text: str, at: int) -> int | None:
    """Where the bracketed value at `at` ends; None if the text ends first; 0 if its quotes or brackets are broken."""
    closing: list[str] = []
    for match in _STRUCTURE.finditer(text, at):
        token = match.group()
        if not closing and match.start() != at:
            return 0
        if token in _CLOSING:
            closing.append(_CLOSING[token])
        elif token in "}]":
            if not closing or token != closing.pop():
                return 0
            if not closing:
                return match.end()
        elif token == '"':
            return 0 if "\n" in text[match.start() :] else None
    return None
