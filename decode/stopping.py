"""Where a row ends: EOS, stop strings, a bound on its tokens. Blocks are cut there, inside too."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase, StopStringCriteria


class Stopping:
    """The ends of the rows of one batch.

    Args:
        max_new_tokens: bound on the new tokens of a row.
        ends: EOS tokens.
        stop_strings: the token that completes one is the last, as with transformers, and its text may go beyond it.
        tokenizer: of the target, for the stop strings.
        prompts: tokens of each row; a stop string may begin in them.

    Raises:
        ValueError: stop strings without a tokenizer, or an empty one.
    """

    def __init__(
        self,
        max_new_tokens: int,
        ends: set[int],
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prompts: Sequence[Sequence[int]] = (),
    ):
        self.max_new_tokens = max_new_tokens
        self.ends = ends
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or [])
        self.criteria = None
        if not strings:
            return
        if not all(strings):
            raise ValueError("stop_strings has an empty string, which would end every text; leave it out")
        if tokenizer is None:
            raise ValueError("stop_strings: the target has no tokenizer; load it from a folder or name that has one")
        self.criteria = StopStringCriteria(tokenizer, strings)
        self.width = self.criteria.maximum_token_len
        self.prompts = [list(prompt[-self.width :]) for prompt in prompts]

    def cut(self, row: int, text: list[int], block: list[int]) -> tuple[list[int], bool]:
        """What of `block` follows the emitted `text` of a row, and whether the row ends with it."""
        room = self.max_new_tokens - len(text)
        for i, token in enumerate(block[:room]):
            if token in self.ends or self._completes(row, text, block[: i + 1]):
                return block[: i + 1], True
        return block[:room], len(block) >= room

    def _completes(self, row: int, text: list[int], block: list[int]) -> bool:
        if self.criteria is None:
            return False
        tail = [*self.prompts[row], *text[-self.width :], *block][-self.width :]
        return bool(self.criteria(torch.tensor([tail]), None)[0])
