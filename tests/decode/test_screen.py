"""What is left on a terminal: the answer, its drafts in colour, and nothing of the line below it."""

import io
import re

import pytest
from rich.console import Console

from draftwood.decode.screen import LiveScreen, Screen

WIDTH, HEIGHT = 20, 12
PIECES = [
    ("Once", False),
    (" upon", True),
    (" a", True),
    (" time there was a", False),
    (" fox.\n", True),
    ("It", False),
]
LONG = [("x" * 90, True), ("y" * 100, False), ("z" * 70, True), ("end", False)]


class Terminal:
    """Draws what rich sends: text, line ends, cursor up, erased lines and colours; cells are (character, is_green)."""

    def __init__(self, sent: str):
        self.rows, self.row, self.column, self.green = [[]], 0, 0, False
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b]", sent):
            self._take(part)

    def _take(self, part):
        if part == "\n":
            self.row, self.column = self.row + 1, 0
            self.rows += [[]] * (self.row == len(self.rows))
        elif part == "\r":
            self.column = 0
        elif re.fullmatch(r"\x1b\[\d*A", part):
            self.row -= int(part[2:-1] or 1)
            assert self.row >= 0, "above the screen"
        elif part == "\x1b[2K":
            self.rows[self.row] = []
        elif re.fullmatch(r"\x1b\[[\d;]*m", part):
            self.green = "32" in part[2:-1].split(";")
        elif not part.startswith("\x1b"):
            if self.column == WIDTH:
                self._take("\n")
            row = self.rows[self.row]
            row += [(" ", False)] * (self.column + 1 - len(row))
            row[self.column] = (part, self.green)
            self.column += 1

    @property
    def cells(self):
        return [cell for row in self.rows for cell in row]


def shown(kind, pieces, status=True, **console):
    file = io.StringIO()
    screen = kind(
        Console(file=file, width=WIDTH, height=HEIGHT, _environ={"TERM": "xterm-256color"}, **console), colour=True
    )
    with screen:
        for text, is_draft in pieces:
            screen.write(text, is_draft)
            if status:
                screen.show("2.50 tokens per step, and more than fits")
    return file.getvalue()


@pytest.mark.parametrize("kind", [Screen, LiveScreen])
@pytest.mark.parametrize("pieces", [PIECES, LONG], ids=["lines", "one line beyond the screen"])
def test_a_terminal_ends_with_the_text_and_exactly_the_drafts_in_colour(kind, pieces):
    sent = shown(kind, pieces, force_terminal=True, color_system="standard")
    expected = [(c, is_draft) for text, is_draft in pieces for c in text if c != "\n"]
    assert Terminal(sent).cells == expected
    assert ("2.50 tokens per" in sent) == (kind is LiveScreen)


def test_without_colour_or_a_terminal_nothing_is_coloured():
    assert "\x1b[32m" in shown(Screen, PIECES, force_terminal=True, color_system="standard")
    assert shown(Screen, PIECES) == "".join(text for text, _ in PIECES)
    for kind in (Screen, LiveScreen):
        sent = shown(kind, PIECES, force_terminal=True, color_system="standard", no_color=True)
        assert not any(green for _, green in Terminal(sent).cells)
