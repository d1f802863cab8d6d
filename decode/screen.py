"""Where an answer is shown as it comes: a file, or a terminal with a line below that says how it is doing."""

import sys
from types import TracebackType
from typing import Self

from rich.cells import chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

_DRAFT_STYLE = "green"


class Screen:
    """Shows the text of one answer at a time; a context manager around each.

    Args:
        console: of the text.
        colour: accepted drafts in colour, where the console has any.
    """

    def __init__(self, console: Console | None = None, colour: bool = False):
        self.console = console or Console()
        self.colour = colour and not self.console.no_color and self.console.color_system is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def write(self, text: str, is_draft: bool = False) -> None:
        """Adds a piece of the answer; `is_draft`: of accepted drafts."""
        if self.colour and is_draft:
            self.console.out(text, style=_DRAFT_STYLE, end="", highlight=False)
        else:
            self.console.file.write(text)
            self.console.file.flush()

    def show(self, status: str) -> None:
        """Says how the answer is doing."""

    def end(self) -> None:
        """Ends the last line, after the answer."""
        self.console.file.write("\n")
        self.console.file.flush()


class LiveScreen(Screen):
    """With the status below the text, until the answer ends.

    The unfinished last line is drawn together with the status, anew with each; whole lines go above them for good.
    """

    def __enter__(self) -> Self:
        self.line, self.status = Text(), Text()
        self.live = Live(console=self.console, transient=True, auto_refresh=False, vertical_overflow="visible")
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()
        self._print(self.line, end="")

    def write(self, text: str, is_draft: bool = False) -> None:
        self.line.append(text, _DRAFT_STYLE if self.colour and is_draft else None)
        *whole, self.line = self.line.split("\n", allow_blank=True)
        rows = self._rows()
        if len(rows) > self.console.height // 2:  # what has scrolled away can't be drawn over
            whole, self.line = [*whole, *rows[:-1]], rows[-1]
        self._update()
        for line in whole:
            self._print(line)

    def show(self, status: str) -> None:
        self.status = Text(status, style="dim", no_wrap=True, overflow="ellipsis")
        self._update(refresh=True)

    def _update(self, refresh: bool = False) -> None:
        self.live.update(Group(*self._rows(), self.status), refresh=refresh)

    def _rows(self) -> list[Text]:
        """The line as the terminal will break it."""
        offset, offsets = 0, []
        for row in chop_cells(self.line.plain, self.console.width):
            offset += len(row)
            offsets.append(offset)
        return list(self.line.divide(offsets[:-1]))

    def _print(self, line: Text, end: str = "\n") -> None:
        self.console.print(line, end=end, soft_wrap=True, highlight=False)


def open_screen(colour: bool = False) -> Screen:
    """The standard output: live where it is a terminal that can move its cursor."""
    console = Console(file=sys.stdout)
    is_live = console.is_terminal and not console.is_dumb_terminal
    return (LiveScreen if is_live else Screen)(console, colour)
