"""Convolution and Mamba-2 scan of an align step: the committed prefix from the target, the last rows from the draft.

As in `harmony.py`, row t of align step j sees column s as align step max(1, j - (t - s)) made it. The columns of a
convolution's window are of that kind, so step k's own output at column s is what every later step sees there. For the
scan it follows that row t of step j reads the state of step 1 after row t - (j - 1), j - 1 updates later:

    y_t = exp(a_1 + .. + a_(j-1)) S_(t-j+1) C_t + sum_d (C_t . B_d) exp(a_1 + .. + a_(d-1)) x_d

with B_d, x_d and log decay a_d those of d - 1 rows before t, from step j - d + 1. No state per row is ever held: the
states at the starts of chunks are made once, in step 1, and read by the queries of every step.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows of which all pairs are formed; states are held at the start of each such chunk.
CHUNK = 64


class Update(NamedTuple):
    """What rows add to the state: S <- exp(log_decay) S + x B^T.

    `x` [B, T, H, P], the time step multiplied in; `B` [B, T, G, S]; `log_decay` [B, T, H], at most 0.
    """

    x: Tensor
    B: Tensor
    log_decay: Tensor


class ChunkStates:
    """A scan of T rows (SSD, arXiv 2405.21060) in chunks of matrix products, to be read by any queries.

    Attributes:
        final: [B, H, P, S], the state after the last row.
    """

    def __init__(self, update: Update, initial_state: Tensor | None = None):
        with torch.autocast(update.x.device.type, enabled=False):
            dtype = update.log_decay.dtype
            self.rows, groups = update.x.shape[1], update.B.shape[2]
            self.chunk = min(CHUNK, self.rows)
            x, keys, decay = (self._chunks(t.to(dtype)) for t in update)
            decay = decay[..., 0].unflatten(2, (groups, -1))  # [B, n, G, H / G, L]
            self.keys = keys  # [B, n, G, L, S]
            self.x = x.unflatten(2, (groups, -1))  # [B, n, G, H / G, L, P]
            self.within = _segment_sums(decay).exp()  # [B, n, G, H / G, L, L]
            self.since_start = decay.cumsum(-1).exp()[..., None]
            added = (self.x * self.within[..., -1, :, None]).transpose(-1, -2) @ keys[:, :, :, None]
            states = self._states(added, decay.sum(-1), initial_state)
            self.starts = states[:, :-1]  # [B, n, G, H / G, P, S]
            self.final = states[:, -1].flatten(1, 2)

    def read(self, queries: Tensor) -> Tensor:
        """[B, T, H, P]: row t's state applied to `queries` [B, T, G, S], in the dtype of the decays."""
        with torch.autocast(queries.device.type, enabled=False):
            C = self._chunks(queries.to(self.keys.dtype))
            scores = (C @ self.keys.transpose(-1, -2))[:, :, :, None] * self.within
            y = scores @ self.x + (C[:, :, :, None] @ self.starts.transpose(-1, -2)) * self.since_start
            return y.flatten(2, 3).transpose(2, 3).flatten(1, 2)[:, : self.rows]

    def _chunks(self, rows: Tensor) -> Tensor:
        """[B, T, heads] or [B, T, heads, width] as [B, n, heads, L, width]; rows added at the end are zero."""
        rows = rows if rows.ndim == 4 else rows[..., None]
        rows = F.pad(rows, (0, 0, 0, 0, 0, -rows.shape[1] % self.chunk))
        return rows.unflatten(1, (-1, self.chunk)).transpose(2, 3)

    @staticmethod
    def _states(added: Tensor, decay: Tensor, initial_state: Tensor | None) -> Tensor:
        """States [B, n + 1, G, H / G, P, S] before each of n chunks and after the last, from what each adds."""
        if initial_state is None:
            initial = torch.zeros_like(added[:, 0])
        else:
            initial = initial_state.to(added.dtype).view(added[:, 0].shape)
        between = _segment_sums(F.pad(decay.movedim(1, -1), (1, 0))).exp()  # [B, G, H / G, n + 1, n + 1]
        changes = torch.cat([initial[:, None], added], 1).movedim(1, 3).flatten(-2)
        return (between @ changes).movedim(3, 1).view(added.shape[0], -1, *added.shape[2:])


def harmonized_conv(inputs: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """Causal depthwise convolution [B, T, D] of align step `len(inputs)`.

    Args:
        inputs: one [B, K - 1 + T, D] per align step so far, the K - 1 rows before the first one in front of each.
        weight: [D, K], the last column for the row itself; bias: [D].
    """
    step, taps = len(inputs), weight.shape[1]
    rows = inputs[0].shape[1] - (taps - 1)
    y = bias
    for distance in range(taps):
        seen = inputs[max(step - 1 - distance, 0)][:, taps - 1 - distance :][:, :rows]
        y = y + seen * weight[:, taps - 1 - distance]
    return y


def harmonized_scan(states: ChunkStates, updates: list[Update], queries: Tensor) -> Tensor:
    """Outputs [B, T, H, P] of align step `len(updates)`, whose queries C are [B, T, G, S].

    Args:
        states: the scan of the first align step's updates.
        updates: of each align step so far, this step's last.
    """
    lag = len(updates) - 1
    if lag == 0:
        return states.read(queries)
    log_decay = torch.zeros_like(updates[0].log_decay)
    y = torch.zeros_like(updates[0].x)
    for distance in range(lag):
        x, B, decay = (_shift(t, distance) for t in updates[lag - distance])
        score = (queries * B).sum(-1).repeat_interleave(x.shape[2] // B.shape[2], 2)
        y = y + (score * log_decay.exp())[..., None] * x
        log_decay = log_decay + decay
    early = F.pad(queries[:, lag:], (0, 0, 0, 0, 0, min(lag, queries.shape[1])))
    return y + log_decay.exp()[..., None] * _shift(states.read(early), lag)


def _shift(rows: Tensor, distance: int) -> Tensor:
    """Rows t - distance of [B, T, ...]; zeros where there is none."""
    if distance == 0:
        return rows
    distance = min(distance, rows.shape[1])
    return F.pad(rows[:, : rows.shape[1] - distance], (0, 0) * (rows.ndim - 2) + (distance, 0))


def _segment_sums(log_decay: Tensor) -> Tensor:
    """[.., L, L]: the sum of `log_decay` [.., L] from below column j to row i; -inf where j is behind i.

    Every entry sums its own terms: the difference of two running sums loses a small segment behind a large one.
    """
    length = log_decay.shape[-1]
    lower = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril()
    terms = log_decay[..., :, None].expand(*log_decay.shape, length).masked_fill(~lower.tril(-1), 0)
    return terms.cumsum(-2).masked_fill(~lower, -torch.inf)
