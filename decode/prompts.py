"""Prompts to evaluate on: from a file, from messages, or from rows with a loss mask."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """`input_ids` [1, T] int64 on the CPU, generation prompt included; `name`, `category` and `turn`, the number of
    the reply in its conversation, are for the report."""

    name: str
    input_ids: Tensor
    category: str = ""
    turn: int = 1


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one source. `num_too_long` were left out for having more than the allowed tokens."""

    name: str
    prompts: list[Prompt]
    num_too_long: int = 0


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> Tensor:
    """Messages through the tokenizer's chat template, up to where the answer starts: [1, T] int64.

    A tokenizer without a template, of a base model, takes the text of the messages as it is.

    Raises:
        ValueError: no token comes out.
    """
    if tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer("\n\n".join(m["content"] for m in messages), return_tensors="pt")
    ids = encoded["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError("the prompt is empty: there is no token to continue")
    return ids.to(torch.int64)


def read_prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, limit: int | None = None, max_tokens: int | None = None
) -> PromptSet:
    """JSON Lines with `turns`, of which the first is the prompt, or with `messages`; `category` and an id are optional.

    Args:
        limit: prompts to take, from the start.
        max_tokens: longer ones are left out and counted.

    Raises:
        ValueError: the line at fault and what was expected, or nothing left.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    too_long = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        row = _parse(line, f"{path}, line {number}")
        ids = encode_messages(tokenizer, row["messages"])
        if max_tokens is not None and ids.shape[1] > max_tokens:
            too_long += 1
            continue
        prompts.append(Prompt(str(row.get("question_id", row.get("id", number))), ids, str(row.get("category", ""))))
    return _checked(PromptSet(path.stem, prompts, too_long))


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


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if isinstance(row, dict) and isinstance(turns := row.get("turns"), list) and turns and isinstance(turns[0], str):
        return {**row, "messages": [{"role": "user", "content": turns[0]}]}
    if isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
        return row
    raise ValueError(f"{where}: expected an object with `turns`, a list of texts, or `messages`")


def _checked(prompts: PromptSet) -> PromptSet:
    if not prompts.prompts:
        raise ValueError(f"{prompts.name}: no prompt left ({prompts.num_too_long} longer than allowed)")
    return prompts
