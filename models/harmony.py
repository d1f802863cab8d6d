"""Attention of an align step: the committed prefix from the target, the last columns from the draft itself.

HASS, harmonized context alignment (arXiv 2408.15766, section 3.2). At align step j, row t sees column s with the key
and value that align step max(1, j - (t - s)) made there: what a draft sees in decoding after j - 1 steps on its own
features. So all but the last j - 1 columns come from step 1, in one causal block, and each later step adds a diagonal.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Rows of scores held at once; longer sequences are attended block by block and recomputed in the backward pass.
BLOCK = 128


def harmonized_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attended values [B, Hq, T, Dh] of align step `len(keys)`.

    Args:
        query: [B, Hq, T, Dh] of this step.
        keys: one [B, Hkv, T, Dh] per align step so far, this step's last.
        values: likewise.
    """
    # The caller's lists grow with every align step, and the backward pass runs the blocks again.
    keys, values = tuple(keys), tuple(values)
    length = query.shape[2]
    if length <= BLOCK:
        return _attend(query, keys, values, 0)
    blocks = [
        checkpoint(_attend, query[:, :, start : start + BLOCK], keys, values, start, use_reentrant=False)
        for start in range(0, length, BLOCK)
    ]
    return torch.cat(blocks, 2)


def _attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], start: int) -> Tensor:
    """`harmonized_attention` of the rows from `start` on that `query` holds."""
    step, (_, num_heads, rows, width) = len(keys), query.shape
    num_kv, end = keys[0].shape[1], start + rows
    grouped = query.unflatten(1, (num_kv, num_heads // num_kv)) * width**-0.5
    row = torch.arange(start, end, device=query.device)
    precise = torch.promote_types(query.dtype, torch.float32)

    block_end = max(end - (step - 1), 1)  # at least one column, so that no product is empty; the mask takes it out
    block = torch.matmul(grouped, keys[0][:, :, None, :block_end].transpose(-1, -2))
    is_seen = torch.arange(block_end, device=query.device) <= (row - (step - 1))[:, None]
    scores = [block.to(precise).masked_fill(~is_seen, float("-inf"))]
    for distance in range(step - 1):
        shifted = _shift(keys[step - 1 - distance], distance, start, end)
        score = (grouped * shifted[:, :, None]).sum(-1, keepdim=True)
        scores.append(score.to(precise).masked_fill((row < distance)[:, None], float("-inf")))
    weights = torch.softmax(torch.cat(scores, -1), -1).to(query.dtype)

    out = torch.matmul(weights[..., :block_end], values[0][:, :, None, :block_end])
    for distance in range(step - 1):
        shifted = _shift(values[step - 1 - distance], distance, start, end)
        out = out + weights[..., block_end + distance, None] * shifted[:, :, None]
    return out.flatten(1, 2)


def _shift(x: Tensor, distance: int, start: int, end: int) -> Tensor:
    """Columns t - distance of x [B, Hkv, T, Dh] for t from `start` to `end`; zeros where there is none."""
    first = start - distance
    if first >= 0:
        return x[:, :, first : end - distance]
    head = x[:, :, : max(end - distance, 0)]
    return torch.nn.functional.pad(head, (0, 0, end - start - head.shape[2], 0))
