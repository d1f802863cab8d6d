"""From a conversation to a training row: token ids and a loss mask, through the tokenizer's own chat template.

The mask comes from **prefix rendering**: the conversation is rendered up to each reply, with the generation prompt, and
past it. Both must be prefixes of the whole rendering, and fall between two tokens of it, or the row is an error: then
training would see tokens that decoding never does. No `{% generation %}` mark is needed in the template.

A reply [a, b) runs from its first token to its terminator (`<|im_end|>` and the like) inclusive, because the draft must
learn to predict the end of the answer; what the template writes after that, such as a newline, is not the model's.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from draftwood.train.conversations import RowError
from draftwood.train.turns import Message, TurnPolicy

# Where a long text may be cut before tokenising: this many characters per token that is kept, and a margin of tokens.
CHARS_PER_TOKEN = 8
MARGIN_TOKENS = 16


@dataclass(frozen=True)
class Row:
    """input_ids: [T] int32. loss_mask: [T] bool, True on the tokens of replies. changes: as in `turns.py`, and
    `system_folded`, `system_dropped`, `last_reply_only`, `clipped`."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    changes: Counter[str]


def supervised_rows(loss_mask: torch.Tensor) -> torch.Tensor:
    """The draft's rows that are trained: t in [a-1, b-3] for every reply [a, b).

    Row t reads the feature of position t and token t+1, and predicts token t+2. The first real drafting position after
    the prompt is a-1, which reads the first reply token; the last is the one that predicts the terminator at b-1.

    Args:
        loss_mask: [..., T] bool or 0/1, True on reply tokens; a run of ones is one reply.
    Returns:
        [..., T] bool.
    """
    reply = loss_mask.bool()
    supervised = torch.zeros_like(reply)
    if reply.shape[-1] > 2:
        supervised[..., :-2] = reply[..., 1:-1] & reply[..., 2:]
    return supervised


class RowBuilder:
    """Turns messages into rows with one tokenizer and its chat template.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        max_length: tokens of a row at most; longer ones are clipped to it or, by `long_rows`, dropped.
        min_length: rows of fewer tokens are dropped.
        policy: `template_without_system` and `unstable_template` are used here.
        template_options: further variables for the template, such as `{"enable_thinking": False}`.
    Raises:
        ValueError: the tokenizer is slow or has no template, or the template can't show where a reply starts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        min_length: int = 0,
        long_rows: Literal["clip", "drop"] = "clip",
        policy: TurnPolicy | None = None,
        template_options: Mapping[str, Any] | None = None,
    ):
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} gives no character offsets: a fast tokenizer is needed")
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set tokenizer.chat_template"
            )
        if max_length < 3:
            raise ValueError(f"max_length is {max_length}: a supervised row needs at least 3 tokens")
        if min_length > max_length:
            raise ValueError(
                f"min_length is {min_length}, above max_length, which is {max_length}: no row would be left"
            )
        if long_rows not in ("clip", "drop"):
            raise ValueError(f"long_rows is {long_rows!r}, expected 'clip' or 'drop'")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.min_length = min_length
        self.long_rows = long_rows
        self.policy = policy or TurnPolicy()
        self.template_options = dict(template_options or {})
        self.special_ids = np.array(
            sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special), dtype=np.int32
        )
        self.template_has_system = self._probe_system()
        self.structure = self._probe_structure()

    def __call__(self, messages: Sequence[Message]) -> Row:
        """One row from alternating messages that end on a reply (`normalise_turns`).

        Raises:
            RowError: `template_error` (the template refuses the messages), `special_token_in_text` (a turn's text holds
                a token that the template marks turns with), `not_prefix_stable` (a rendering is no prefix of the
                whole), `boundary_in_token` (a reply starts or ends inside a token), `nothing_supervised`,
                `clipped_to_nothing` (no supervised row is left within max_length), `too_long`, `too_short`.
        """
        messages, changes = self._settle_system(list(messages))
        for message in messages:
            if self.structure and (found := self.structure.search(message["content"])):
                raise RowError("special_token_in_text", f"{found.group()} in a turn of the {message['role']}")
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            text, spans = self._spans(messages, replies)
        except RowError as error:
            if error.reason != "not_prefix_stable" or self.policy.unstable_template == "drop_row" or len(replies) == 1:
                raise
            text, spans = self._spans(messages, replies[-1:])
            changes["last_reply_only"] += 1
        return self._tokenize(text, spans, changes)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of messages that end on a user turn, up to where the reply starts, as a row would begin.

        Raises:
            RowError: `template_error`.
        """
        settled, _ = self._settle_system(list(messages))
        text = self._render([settled], generation_prompt=True)[0]
        return cast(list[int], self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _settle_system(self, messages: list[Message]) -> tuple[list[Message], Counter[str]]:
        if self.template_has_system or messages[0]["role"] != "system":
            return messages, Counter()
        if self.policy.template_without_system == "drop":
            return messages[1:], Counter(system_dropped=1)
        folded = Message(role="user", content=f"{messages[0]['content']}\n\n{messages[1]['content']}")
        return [folded, *messages[2:]], Counter(system_folded=1)

    def _spans(self, messages: list[Message], replies: list[int]) -> tuple[str, list[tuple[int, int]]]:
        """The whole rendering, and where each reply starts and ends in it, in characters."""
        before = self._render([messages[:i] for i in replies], generation_prompt=True)
        past = self._render([messages[: i + 1] for i in replies], generation_prompt=False)
        text = past[-1]
        for number, (start, end) in enumerate(zip(before, past, strict=True), start=1):
            if not (text.startswith(end) and end.startswith(start) and len(start) < len(end)):
                where = f"reply {number} of {len(replies)}"
                raise RowError("not_prefix_stable", f"the rendering up to or past {where} is no prefix of the whole")
        return text, [(len(start), len(end)) for start, end in zip(before, past, strict=True)]

    def _render(self, conversations: list[list[Message]], *, generation_prompt: bool) -> list[str]:
        try:
            rendered = self.tokenizer.apply_chat_template(
                conversations, tokenize=False, add_generation_prompt=generation_prompt, **self.template_options
            )
            return cast(list[str], rendered)
        except TemplateError as error:
            raise RowError("template_error", str(error)) from error

    def _tokenize(self, text: str, spans: list[tuple[int, int]], changes: Counter[str]) -> Row:
        ids, starts, ends = self._encode_enough(text, [end for _, end in spans])
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            first = self._token_at(text, start, ids, starts, ends)
            last = self._end_of_reply(text, first, end, ids, starts, ends)
            mask[first:last] = True
            if last >= self.max_length:
                break
        if len(ids) < self.min_length:
            raise RowError("too_short", f"{len(ids)} tokens, min_length is {self.min_length}")
        if len(ids) > self.max_length:
            if self.long_rows == "drop":
                raise RowError("too_long", f"more than {self.max_length} tokens")
            changes["clipped"] += 1
        clipped = mask[: self.max_length]
        if not supervised_rows(torch.from_numpy(clipped)).any():
            if supervised_rows(torch.from_numpy(mask)).any():
                raise RowError("clipped_to_nothing", f"no reply within {self.max_length} tokens")
            raise RowError("nothing_supervised", "every reply is shorter than two tokens")
        return Row(ids[: self.max_length], clipped, changes)

    def _encode_enough(self, text: str, turn_ends: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids [T] int32 and character offsets of a text, or of its first turns if they fill `max_length` by far."""
        enough = CHARS_PER_TOKEN * self.max_length
        while True:
            # Turns end where the template marks it, so cutting there leaves the tokens before it as they are.
            cut = next((end for end in turn_ends if end >= enough), len(text))
            ids, starts, ends = self._encode(text[:cut])
            if cut == len(text) or len(ids) >= self.max_length + MARGIN_TOKENS:
                return ids, starts, ends
            enough *= 4

    def _encode(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            truncation=False,
            verbose=False,
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.array(encoded["input_ids"], dtype=np.int32), offsets[:, 0], offsets[:, 1]

    def _token_at(self, text: str, at: int, ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> int:
        """The index of the first token that starts at character `at`; a token that reaches over it is an error."""
        index = int(np.searchsorted(starts, at))
        previous_end = ends[index - 1] if index else 0
        next_start = starts[index] if index < len(starts) else len(text)
        if previous_end == at == next_start:
            return index
        # Some tokenizers leave spaces out of the offsets: then only tokenising the prefix tells.
        if previous_end <= at <= next_start and np.array_equal(self._encode(text[:at])[0], ids[:index]):
            return index
        raise RowError("boundary_in_token", f"a reply's boundary at character {at} falls inside a token")

    def _end_of_reply(
        self, text: str, first: int, end: int, ids: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> int:
        """The index after the reply's terminator: its last special token if only spaces follow, else its last token."""
        last = int(np.searchsorted(starts, end))
        special = np.flatnonzero(np.isin(ids[first:last], self.special_ids))
        if len(special) and not text[ends[first + special[-1]] : end].strip():
            return first + int(special[-1]) + 1
        return self._token_at(text, end, ids, starts, ends)

    def _probe_system(self) -> bool:
        """Whether the template takes a system message and writes its text."""
        messages = [Message(role="system", content="systemprobe"), Message(role="user", content="userprobe")]
        try:
            return "systemprobe" in self._render([messages], generation_prompt=True)[0]
        except RowError:
            return False

    def _probe_structure(self) -> re.Pattern[str] | None:
        """A pattern of the special tokens that the template itself writes: the marks of turns."""
        messages = [Message(role="user", content="userprobe"), Message(role="assistant", content="replyprobe")]
        prompt = self._render([messages[:1]], generation_prompt=True)[0]
        whole = self._render([messages], generation_prompt=False)[0]
        bare = self._render([messages[:1]], generation_prompt=False)[0]
        if prompt == bare and not whole[len(prompt) :].lstrip().startswith("replyprobe"):
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} ignores add_generation_prompt, so nothing shows "
                "where a reply starts; give the tokenizer a template that honours it"
            )
        marks = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        written = sorted(mark for mark in marks if mark in whole or mark in prompt)
        return re.compile("|".join(map(re.escape, written))) if written else None
