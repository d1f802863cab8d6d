"""Conversations as one stream of tokens, cut into blocks of one length: without padding."""

from hashlib import sha256

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor


class TokenBlocks:
    """Blocks of `length` tokens from the prepared `rows`, whose order is shuffled by `seed`; `digest` names them."""

    def __init__(self, rows: Dataset, length: int, seed: int, name: str = "rows"):
        """Raises:
        ValueError: the rows, called `name` then, have fewer tokens than one block.
        """
        order = np.random.default_rng(seed).permutation(len(rows))
        ids = [np.asarray(batch, np.int32) for part in rows.iter(1000) for batch in part["input_ids"]]
        stream = np.concatenate([np.empty(0, np.int32), *(ids[i] for i in order)])
        if len(stream) < length:
            raise ValueError(f"the {name} have {len(stream)} tokens, fewer than one block of {length}")
        self.blocks = torch.from_numpy(stream[: len(stream) // length * length].reshape(-1, length))

        self.digest = sha256(self.blocks.numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.blocks)

    def batch(self, number: int, size: int) -> Tensor:
        """Batch `number` from 0, [size, length] int64; the stream begins again where it ends."""
        places = torch.arange(number * size, (number + 1) * size) % len(self.blocks)
        return self.blocks[places].long()
