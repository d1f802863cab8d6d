"""A prompt answered in the terminal: text as it comes, then what it took."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwood.decode.generate import GenerateOutput, stream
from draftwood.decode.prompts import check_room, encode_messages
from draftwood.decode.screen import Screen
from draftwood.decode.text import TextStream

if TYPE_CHECKING:
    from draftwood.decode.propose import Proposer
    from draftwood.decode.propose.base import Drafter
    from draftwood.models.target import Target


class Reply(NamedTuple):
    """What was answered, as text and as `generate` has it, and a line that says what it took."""

    text: str
    output: GenerateOutput
    summary: str
    is_interrupted: bool


def answer(
    target: "Target",
    draft: "Drafter | Proposer | None",
    prompt: str | Sequence[Mapping[str, str]],
    screen: Screen,
    *,
    max_new_tokens: int = 256,
    **settings: Any,
) -> Reply:
    """Answers `prompt`, handing each piece of text to `screen`; Ctrl-C ends it and keeps what there is.

    A character that drafts only began is shown with the token that completes it.

    Args:
        prompt: a chat turn, or the messages of a whole conversation.
        settings: as `generate`.

    Raises:
        PromptTooLong: prompt and answer may go beyond the target's positions.
        ValueError: the target has no tokenizer, the prompt is blank, or a setting is wrong.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer: it can't turn the prompt into tokens")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not messages[-1]["content"].strip():
        raise ValueError("the prompt is blank: there is nothing to answer")
    ids = encode_messages(target.tokenizer, messages)
    check_room(target, ids, max_new_tokens)
    text, pieces = TextStream(target.tokenizer), []
    output, is_interrupted = GenerateOutput(tokens=[[]]), False
    blocks = stream(target, draft, ids, max_new_tokens=max_new_tokens, **settings)
    started = perf_counter()

    def write(piece: str, is_draft: bool = False) -> None:
        if piece:
            pieces.append(piece)
            screen.write(piece, is_draft)

    with screen:
        try:
            for block in blocks:
                output = block.output
                forwards = output.rows[0].forwards
                accepted = forwards[-1].accepted if forwards else 0  # the drafts of a block come first
                for i, token in enumerate(block.tokens[0]):
                    write(text.add([token]), i < accepted)
                screen.show(_status(output, perf_counter() - started))
        except KeyboardInterrupt:
            is_interrupted = True
        seconds = perf_counter() - started
        write(text.finish())
    summary = _summary(output, seconds) + (" (interrupted)" if is_interrupted else "")
    return Reply("".join(pieces), output, summary, is_interrupted)


def _status(output: GenerateOutput, seconds: float) -> str:
    tokens = len(output.tokens[0])
    if not output.steps:
        return f"reading the prompt took {seconds:.1f} s"
    return f"{output.rows[0].acceptance_length:.2f} tokens per step, {tokens / seconds:.1f} tokens/s, {tokens} tokens"


def _summary(output: GenerateOutput, seconds: float) -> str:
    tokens = len(output.tokens[0])
    if not output.steps:
        return f"{tokens} tokens in {seconds:.2f} s, none after prefill"
    return (
        f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s; acceptance length "
        f"{output.rows[0].acceptance_length:.2f} (tokens per target forward after prefill, {output.steps} forwards)"
    )
