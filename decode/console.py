"""A prompt answered in the terminal: text as it comes, then what it took."""

from collections.abc import Callable
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
    prompt: str,
    write: Callable[[str], object],
    **settings: Any,
) -> tuple[GenerateOutput, str]:
    """Answers `prompt` as a chat turn, handing each piece of text to `write`; Ctrl-C ends it and keeps what there is.

    Args:
        settings: as `generate`.

    Returns:
        The output and a line that says what it took.

    Raises:
        ValueError: the target has no tokenizer, or a setting is wrong.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer: it can't turn the prompt into tokens")
    ids = encode_messages(target.tokenizer, [{"role": "user", "content": prompt}])
    text = TextStream(target.tokenizer)
    output, is_interrupted = GenerateOutput(tokens=[[]]), False
    started = perf_counter()
    try:
        for block in stream(target, draft, ids, **settings):
            output = block.output
            write(text.add(block.tokens[0]))
    except KeyboardInterrupt:
        is_interrupted = True
    seconds = perf_counter() - started
    write(text.finish())
    return output, _summary(output, seconds) + (" (interrupted)" if is_interrupted else "")


def _summary(output: GenerateOutput, seconds: float) -> str:
    tokens = len(output.tokens[0])
    if not output.steps:
        return f"{tokens} tokens in {seconds:.2f} s, none after prefill"
    return (
        f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s; acceptance length "
        f"{output.rows[0].acceptance_length:.2f} (tokens per target forward after prefill, {output.steps} forwards)"
    )
