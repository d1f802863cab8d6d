"""A conversation in the terminal, or one turn a line from a pipe."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from draftwood.decode.console import answer

if TYPE_CHECKING:
    from draftwood.decode.propose import Proposer
    from draftwood.decode.propose.base import Drafter
    from draftwood.models.target import Target


def chat(
    target: "Target",
    draft: "Drafter | Proposer | None",
    read: Callable[[], str],
    write: Callable[[str], object],
    report: Callable[[str], object],
    *,
    system: str | None = None,
    write_draft: Callable[[str], object] | None = None,
    **settings: Any,
) -> list[dict[str, str]]:
    """Answers turn after turn, each with the whole conversation before it, until `/exit` or the end of the input.

    `/reset` forgets the turns, not the system message. Ctrl-C stops an answer, of which what was written stays in the
    conversation; where a turn is awaited it drops the line.

    Args:
        read: gives the next turn; EOFError ends the chat.
        report: gets a line after each answer, what it took.
        settings: as `generate`.

    Returns:
        The messages at the end.

    Raises:
        ValueError: as `answer`.
    """
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    while True:
        try:
            turn = read().strip()
        except KeyboardInterrupt:
            write("\n")
            continue
        except EOFError:
            return messages
        if turn == "/exit":
            return messages
        if turn == "/reset":
            messages = list(start)
            report("the conversation starts anew")
        elif turn:
            pieces: list[str] = []

            messages.append({"role": "user", "content": turn})
            _, summary = answer(
                target,
                draft,
                messages,
                partial(_keep, pieces, write),
                None if write_draft is None else partial(_keep, pieces, write_draft),
                **settings,
            )
            messages.append({"role": "assistant", "content": "".join(pieces)})
            write("\n")
            report(summary)


def _keep(pieces: list[str], show: Callable[[str], object], text: str) -> None:
    pieces.append(text)
    show(text)
