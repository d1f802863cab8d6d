"""A conversation in the terminal, or one turn a line from a pipe."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from draftwood.decode.console import answer
from draftwood.decode.prompts import PromptTooLong
from draftwood.decode.screen import Screen

if TYPE_CHECKING:
    from draftwood.decode.propose import Proposer
    from draftwood.decode.propose.base import Drafter
    from draftwood.models.target import Target


def chat(
    target: "Target",
    draft: "Drafter | Proposer | None",
    read: Callable[[], str],
    screen: Screen,
    report: Callable[[str], object],
    *,
    system: str | None = None,
    **settings: Any,
) -> list[dict[str, str]]:
    """Answers turn after turn, each with the whole conversation before it, until `/exit` or the end of the input.

    `/reset` forgets the turns, not the system message. Ctrl-C stops an answer, of which what was written stays in the
    conversation; where a turn is awaited it drops the line. A turn for which there is no room is dropped as well.

    Args:
        read: gives the next turn; EOFError ends the chat.
        screen: shows the answers.
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
            report("")
            continue
        except EOFError:
            return messages
        if turn == "/exit":
            return messages
        if turn == "/reset":
            messages = list(start)
            report("the conversation starts anew")
        elif turn:
            asked = [*messages, {"role": "user", "content": turn}]
            try:
                reply = answer(target, draft, asked, screen, **settings)
            except PromptTooLong as error:
                report(f"this turn is left out: {error}; /reset starts the conversation anew")
                continue
            messages = [*asked, {"role": "assistant", "content": reply.text}]
            screen.end()
            report(reply.summary)
