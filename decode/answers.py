"""Answers to a batch of prompts as text, and later turns of conversations, which follow the answer before them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draftwood.decode.generate import own_eos, stream
from draftwood.decode.prompts import Prompt, PromptSet, encode_messages, has_room, padded
from draftwood.decode.stats import RowStats

if TYPE_CHECKING:
    from draftwood.decode.propose import Proposer
    from draftwood.decode.propose.base import Drafter
    from draftwood.models.target import Target

EOS, STOP_STRING, LENGTH = "eos", "stop_string", "length"  # why an answer ends


@dataclass(frozen=True)
class Answer:
    """`text` and `tokens` of one prompt, the tokens with EOS where it came; `seconds` from the start of the batch."""

    text: str
    tokens: list[int]
    stats: RowStats
    finish_reason: str
    seconds: float


def answer_batch(
    target: "Target",
    draft: "Drafter | Proposer | None",
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    stop_strings: Sequence[str] = (),
    on_answer: Callable[[int, Answer], object] = lambda row, answer: None,
    **settings: Any,
) -> list[Answer]:
    """Answers prompts [1, T] together.

    Args:
        on_answer: called with the row and its answer as soon as it has ended.
        settings: as `generate`.

    Raises:
        ValueError: the target has no tokenizer, or a setting is wrong.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer: answers can't be written as text")
    ids, mask = padded(prompts)
    ends = set(own_eos(target))
    answers: dict[int, Answer] = {}

    def end(row: int, tokens: list[int], stats: RowStats) -> None:
        is_whole = tokens[-1] in ends
        text = tokenizer.decode(tokens[:-1] if is_whole else tokens, skip_special_tokens=True)
        is_stopped = len(tokens) < max_new_tokens or any(stop in text for stop in stop_strings)
        reason = EOS if is_whole else STOP_STRING if is_stopped else LENGTH
        answers[row] = Answer(text, tokens, stats, reason, perf_counter() - started)
        on_answer(row, answers[row])

    started = perf_counter()
    output = None
    for block in stream(
        target,
        draft,
        ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        stop_strings=list(stop_strings) or None,
        **settings,
    ):
        output = block.output
        for row, (new, tokens) in enumerate(zip(block.tokens, output.tokens, strict=True)):
            # A stop string shows in the block after it: no token comes any more.
            has_ended = not new or tokens[-1] in ends or len(tokens) == max_new_tokens
            if has_ended and row not in answers:
                end(row, tokens, output.rows[row])
    assert output is not None
    for row, tokens in enumerate(output.tokens):
        if row not in answers:
            end(row, tokens, output.rows[row])
    return [answers[row] for row in range(len(prompts))]


def batch_seed(seed: int, turn: int, keys: Sequence[Any]) -> int:
    """The seed of one batch, which depends on what is in it alone: a run that is gone on with draws the same."""
    return int(sha256(json.dumps([seed, turn, list(keys)]).encode()).hexdigest()[:15], 16)


def with_later_turns(
    target: "Target",
    draft: "Drafter | Proposer | None",
    prompts: PromptSet,
    *,
    max_new_tokens: int,
) -> PromptSet:
    """The prompts, and after each those of its conversation's later turns.

    The answers between them are the target's own greedy ones, made here, once: every way of decoding that is measured
    gets the same prompts. A later prompt with more than the set's `max_tokens`, or without room in the target's
    positions, is counted as too long, as are those behind it.

    Args:
        draft: to be faster, by a dynamic tree; it does not change the answers.
    """
    every: list[Prompt] = []
    too_long = prompts.num_too_long
    for prompt in prompts.prompts:
        talk = prompt.conversation
        if talk is None or not talk.later:
            every.append(prompt)
            continue
        every.append(replace(prompt, name=f"{prompt.name}.1"))
        messages, ids = list(talk.messages), prompt.input_ids
        for turn, text in enumerate(talk.later, 2):
            (answer,) = answer_batch(target, draft, [ids], max_new_tokens=max_new_tokens)
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": text}]
            ids = encode_messages(target.tokenizer, messages)
            limit = prompts.max_tokens
            if (limit is not None and ids.shape[1] > limit) or not has_room(target, ids, max_new_tokens):
                too_long += 2 + len(talk.later) - turn
                break
            every.append(Prompt(f"{prompt.name}.{turn}", ids, prompt.category, turn))
    return replace(prompts, prompts=every, num_too_long=too_long)
