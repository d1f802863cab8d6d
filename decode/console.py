"""A prompt answered in the terminal: text as it comes, then what it took."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from draftwood.decode.generate import GenerateOutput, stream
from draftwood.decode.prompts import encode_messages
from draftwood.decode.text import TextStream

if TYPE_CHECKING:
    from draftwood.decode.propose import Proposer
    from draftwood.decode.propose.base import Drafter
    from draftwood.models.target import Target


def answer(
    target: "Target",
    draft: "Drafter | Proposer | None",
    prompt: str | Sequence[Mapping[str, str]],
    write: Callable[[str], object],
    write_draft: Callable[[str], object] | None = None,
    **settings: Any,
) -> tuple[GenerateOutput, str]:
    """Answers `prompt`, handing each piece of text to `write`; Ctrl-C ends it and keeps what there is.

    Args:
        prompt: a chat turn, or the messages of a whole conversation.
        write_draft: gets the text of accepted drafts in place of `write`; a character that drafts only began is written
            with the token that completes it.
        settings: as `generate`.

    Returns:
        The output and a line that says what it took.

    Raises:
        ValueError: the target has no tokenizer, or a setting is wrong.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer: it can't turn the prompt into tokens")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    ids = encode_messages(target.tokenizer, messages)
    text = TextStream(target.tokenizer)
    output, is_interrupted = GenerateOutput(tokens=[[]]), False
    started = perf_counter()
    try:
        for block in stream(target, draft, ids, **settings):
            output = block.output
            tokens, forwards = block.tokens[0], output.rows[0].forwards
            accepted = forwards[-1].accepted if forwards else 0  # the drafts of a block come first
            if accepted and write_draft is not None:
                write_draft(text.add(tokens[:accepted]))
                tokens = tokens[accepted:]
            write(text.add(tokens))
    except KeyboardInterrupt:
        is_interrupted = True
    seconds = perf_counter() - started
    write(text.finish())
    return output, _summary(output, seconds) + (" (interrupted)" if is_interrupted else "")


def read_utf8(data: bytes, name: str = "the standard input") -> str:
    """`data` as text.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: byte {error.start + 1} is 0x{data[error.start]:02x}") from None


def _summary(output: GenerateOutput, seconds: float) -> str:
    tokens = len(output.tokens[0])
    if not output.steps:
        return f"{tokens} tokens in {seconds:.2f} s, none after prefill"
    return (
        f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s; acceptance length "
        f"{output.rows[0].acceptance_length:.2f} (tokens per target forward after prefill, {output.steps} forwards)"
    )
