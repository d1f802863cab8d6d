"""A row of training data as a person reads it: its text, and in colour what of it is trained."""

from collections.abc import Sequence
from itertools import groupby

import torch
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftwood.train.rows import supervised_rows

# Replies are bracketed as well, for a terminal or a file without colours.
_STYLES = {"context": "dim", "read": "yellow", "trained": "bold green"}
_OPEN, _CLOSE = "⟦", "⟧"


def spans(
    input_ids: Sequence[int], loss_mask: Sequence[bool], tokenizer: PreTrainedTokenizerBase, max_tokens: int = 400
) -> list[tuple[str, str]]:
    """A row in pieces of (kind, text): `trained` is what the draft learns to predict, `read` a reply's first token,
    which it reads, `context` the rest.

    Args:
        input_ids, loss_mask: [T] each, as prepared; the mask is true on replies.
        max_tokens: the rest is left out.
    """
    mask = torch.as_tensor(loss_mask).bool()
    is_predicted = torch.zeros_like(mask)
    is_predicted[2:] = supervised_rows(mask)[:-2]  # row t predicts token t + 2
    kinds = ["trained" if p else "read" if m else "context" for p, m in zip(is_predicted, mask, strict=True)]
    runs = groupby(range(min(len(mask), max_tokens)), key=kinds.__getitem__)
    return [(kind, tokenizer.decode([int(input_ids[i]) for i in run])) for kind, run in runs]


def mask_view(
    input_ids: Sequence[int], loss_mask: Sequence[bool], tokenizer: PreTrainedTokenizerBase, max_tokens: int = 400
) -> Text:
    """The row's text: what the draft is trained to predict in green, a reply's first token, which it reads, in yellow.

    Args:
        input_ids, loss_mask: [T] each, as prepared; the mask is true on replies.
        max_tokens: the rest is left out, and said to be.
    """
    num_trained = int(supervised_rows(torch.as_tensor(loss_mask)).sum())
    view = Text(f"{len(loss_mask)} tokens, {num_trained} of them trained to be predicted\n")
    is_open = False
    for kind, text in spans(input_ids, loss_mask, tokenizer, max_tokens):
        if is_open != (kind != "context"):
            view.append(_CLOSE if is_open else _OPEN, "bold")
            is_open = not is_open
        view.append(text, _STYLES[kind])
    view.append(_CLOSE if is_open else "", "bold")
    if len(loss_mask) > max_tokens:
        view.append(f" ... {len(loss_mask) - max_tokens} tokens more", "dim italic")
    return view
