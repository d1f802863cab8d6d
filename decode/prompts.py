"""Prompts to evaluate on: from a file, from messages, or from rows with a loss mask."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from draftwood.decode.text import read_utf8
from draftwood.models.draft import max_length

if TYPE_CHECKING:
    from draftwood.models.target import Target


@dataclass(frozen=True)
class Conversation:
    """Of line or entry `row` of a file, from 1: the `messages` before the first answer, and the `later` turns of the
    user, each to be asked after the answer before it."""

    row: int
    name: str
    messages: list[dict[str, str]]
    later: tuple[str, ...] = ()
    category: str = ""


@dataclass(frozen=True)
class Prompt:
    """`input_ids` [1, T] int64 on the CPU, generation prompt included; `name`, `category` and `turn`, the number of
    the reply in its conversation, are for the report. `conversation`: what it begins, where that is known."""

    name: str
    input_ids: Tensor
    category: str = ""
    turn: int = 1
    conversation: Conversation | None = None


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one source. `num_too_long` were left out for having more than the allowed tokens, `max_tokens`."""

    name: str
    prompts: list[Prompt]
    num_too_long: int = 0
    max_tokens: int | None = None


class PromptTooLong(ValueError):
    """A prompt and its answer do not fit into the target's positions."""


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> Tensor:
    """Messages through the tokenizer's chat template, up to where the answer starts: [1, T] int64.

    A tokenizer without a template, of a base model, takes the text of the messages as it is.

    Raises:
        ValueError: no token comes out, a text can't be written as UTF-8, or the template refuses the messages.
    """
    for message in messages:
        try:
            message["content"].encode("utf-8")
        except UnicodeEncodeError as error:  # a lone surrogate: of an argument in other bytes, or escaped in JSON
            what = f"character {error.start + 1} is {message['content'][error.start]!a}"
            raise ValueError(f"the {message['role']}'s text is not UTF-8: {what}") from None
    if tokenizer.chat_template:
        try:
            encoded = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise ValueError(f"the chat template refuses these messages (roles {roles}): {error}") from None
    else:
        encoded = tokenizer("\n\n".join(m["content"] for m in messages), return_tensors="pt")
    ids = encoded["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError("the prompt is empty: there is no token to continue")
    return ids.to(torch.int64)


def has_room(target: "Target", ids: Tensor, max_new_tokens: int) -> bool:
    """Whether the target has positions for the prompt [1, T] and so many tokens after it."""
    positions = max_length(target)
    return positions is None or ids.shape[1] + max_new_tokens <= positions


def check_room(target: "Target", ids: Tensor, max_new_tokens: int) -> None:
    """Raises PromptTooLong where `has_room` is false."""
    if not has_room(target, ids, max_new_tokens):
        raise PromptTooLong(
            f"the prompt has {ids.shape[1]} tokens and the answer may have {max_new_tokens} (max_new_tokens), but "
            f"{target.name} has positions for {max_length(target)} in all"
        )


def read_conversations(path: str | Path) -> Iterator[Conversation]:
    """The prompts of a file.

    `.txt`: one a line. `.json`: an array of objects. Anything else is JSON Lines, an object a line. An object has
    `turns`, a list of texts of the user, or `prompt`, one text, or `messages`; `category` and an id (`question_id` or
    `id`) are optional. Blank lines are passed over.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder; or the line or entry at fault and what was expected.
    """
    path = Path(path)
    expected = "expected a file of prompts, .jsonl or .json with `turns` or .txt with one a line"
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; {expected}")
    if path.is_dir():
        raise ValueError(f"{path}: a folder; {expected}")
    text = read_utf8(path.read_bytes(), str(path)).removeprefix("\ufeff")
    if path.suffix == ".json":
        entries = _load(text, str(path))
        if not isinstance(entries, list):
            raise ValueError(f"{path}: expected an array of objects; JSON Lines belong into a .jsonl file")
        for number, entry in enumerate(entries, 1):
            yield _conversation(entry, number, f"{path}, entry {number}")
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would split inside JSON, at U+2028
        if line.strip():
            where = f"{path}, line {number}"
            entry = {"prompt": line.strip()} if path.suffix == ".txt" else _load(line, where)
            yield _conversation(entry, number, where)


def read_prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, limit: int | None = None, max_tokens: int | None = None
) -> PromptSet:
    """What stands before the first answer of each of a file's conversations; see `read_conversations`.

    Args:
        limit: prompts to take, from the start.
        max_tokens: longer ones are left out and counted.

    Raises:
        ValueError: the line at fault and what was expected, or nothing left.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    too_long = 0
    for talk in read_conversations(path):
        if limit is not None and len(prompts) == limit:
            break
        ids = encode_messages(tokenizer, talk.messages)
        if max_tokens is not None and ids.shape[1] > max_tokens:
            too_long += 1
            continue
        prompts.append(Prompt(talk.name, ids, talk.category, conversation=talk))
    return _checked(PromptSet(path.stem, prompts, too_long, max_tokens))


def prompts_from_rows(
    rows: Iterable[Mapping[str, Any]],
    name: str,
    *,
    limit: int | None = None,
    max_tokens: int | None = None,
    every_turn: bool = False,
) -> PromptSet:
    """Prompts of tokenised conversations: of each row what stands before its first reply, or with `every_turn` before
    each of its replies.

    Args:
        rows: with `input_ids` [T] and `loss_mask` [T], true on replies.
        name: of the set, for the report.

    Raises:
        ValueError: nothing left.
    """
    prompts: list[Prompt] = []
    too_long = 0
    for number, row in enumerate(rows):
        if limit is not None and len(prompts) == limit:
            break
        mask = torch.as_tensor(row["loss_mask"]).bool()
        if mask[0]:
            continue  # a reply without a prompt
        starts = (mask & ~mask.roll(1)).nonzero().flatten().tolist()
        for turn, start in enumerate(starts, 1):
            if turn > 1 and not every_turn:
                break
            if max_tokens is not None and start > max_tokens:
                too_long += 1
                continue
            ids = torch.as_tensor(row["input_ids"])[None, :start].to(torch.int64)
            prompts.append(Prompt(f"{number}.{turn}" if every_turn else str(number), ids, turn=turn))
    prompts = prompts[:limit]
    return _checked(PromptSet(name, prompts, too_long))


def padded(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One batch of prompts [1, T] each: ids and mask [B, T], padded on the left."""
    width = max(ids.shape[1] for ids in prompts)
    pad = [F.pad(ids, (width - ids.shape[1], 0)) for ids in prompts]
    mask = [F.pad(torch.ones_like(ids), (width - ids.shape[1], 0)) for ids in prompts]
    return torch.cat(pad), torch.cat(mask)


def _load(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); plain prompts, one a line, belong into a .txt file") from None


def _conversation(entry: Any, number: int, where: str) -> Conversation:
    row = entry if isinstance(entry, dict) else {}
    turns, messages = row.get("turns", [row["prompt"]] if "prompt" in row else None), row.get("messages")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        asked, later = [{"role": "user", "content": turns[0]}], tuple(turns[1:])
    elif isinstance(messages, list) and messages and all(map(_is_message, messages)):
        asked, later = messages, ()
    else:
        raise ValueError(
            f"{where}: expected an object with `turns`, a list of texts, or `prompt`, a text, or `messages`, each with "
            "`role` and `content`"
        )
    if not all(text.strip() for text in (asked[-1]["content"], *later)):
        raise ValueError(f"{where}: a blank prompt")
    name = str(row.get("question_id", row.get("id", number)))
    return Conversation(number, name, asked, later, str(row.get("category", "")))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _checked(prompts: PromptSet) -> PromptSet:
    if not prompts.prompts:
        raise ValueError(f"{prompts.name}: no prompt left ({prompts.num_too_long} longer than allowed)")
    return prompts
