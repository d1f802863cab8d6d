"""The draft's own cache: keys and values of committed rows, and of the tree nodes drafted since."""

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.models.cache import KeyValueBuffer
from draftwood.models.state import accepted_columns
from draftwood.models.transfer import send


class DraftState:
    """Attributes:
    lengths: rows committed for each row of the batch.
    num_nodes: tree nodes behind them, not committed.
    """

    def __init__(self, batch_size: int, num_layers: int):
        self.lengths = [0] * batch_size
        self.num_nodes = 0
        self.buffers = [KeyValueBuffer() for _ in range(num_layers)]
        self._committed: tuple[Tensor, Tensor] | None = None

    @property
    def width(self) -> int:
        return max(self.lengths)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Writes the new columns behind the present ones and attends; mask [B, 1, t, columns] bool, None is causal."""
        all_keys, all_values = self.buffers[layer].write(keys, values, self.width + self.num_nodes)
        return F.scaled_dot_product_attention(
            query, all_keys, all_values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    def committed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`lengths` [B, 1] int64 and which columns they are, [B, 1, width] bool, made once per commit."""
        if self._committed is None:
            lengths = send(self.lengths, device)[:, None]
            self._committed = lengths, (torch.arange(self.width, device=device) < lengths)[:, None]
        return self._committed

    def mask_for(self, below: Tensor, device: torch.device) -> Tensor:
        """[B, 1, t, width + c] bool: a row's committed columns, then `below` [B or 1, t, c] over the columns behind."""
        _, prefix = self.committed(device)
        shape = (len(self.lengths), below.shape[1], -1)
        return torch.cat([prefix.expand(shape), below.expand(shape)], -1)[:, None]

    def commit(self, num_new: int, counts: list[int]) -> None:
        """Keeps the first counts[b] of the `num_new` columns just written for row b."""
        width = self.width
        columns = accepted_columns([range(count) for count in counts], self.lengths, width)
        if columns is not None:
            for buffer in self.buffers:
                device = buffer.keys.device  # type: ignore[union-attr]
                buffer.move(send(columns[0], device), send(columns[1], device))
        self._committed = None
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
