"""Mamba-2 (SSD, arXiv 2405.21060) over whole sequences, in the chunked matrix form that trains fast where there is no
fused kernel: everything but the decays is a batched matmul, which autocast may run in bfloat16."""

import torch
from torch import Tensor


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, chunk: int = 64
) -> Tensor:
    """Outputs y_t = S_t C_t + D x_t of the recurrence S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T from a zero state.

    Args:
        x: [B, T, H, P].
        dt: [B, T, H], processed: positive. A: [H], negative. D: [H].
        B, C: [B, T, G, S]; head h reads group h // (H / G).
        chunk: tokens within which all pairs are formed.

    Returns:
        [B, T, H, P] in the dtype of the matmuls; differentiable in every tensor.
    """
    batch, tokens, heads, _ = x.shape
    groups = B.shape[2]
    length = min(chunk, tokens)
    pad = -tokens % length
    if pad:  # a padded token has dt = 0: it neither decays the state nor adds to it
        x, dt, B, C = (torch.nn.functional.pad(t, [0, 0] * (t.ndim - 2) + [0, pad]) for t in (x, dt, B, C))
    shape = (batch, (tokens + pad) // length, length)
    # [B, chunks, H, L, *]
    values = x.unflatten(1, shape[1:]).transpose(2, 3)
    keys, queries = (t.unflatten(1, shape[1:]).transpose(2, 3) for t in (B, C))
    steps = dt.float().unflatten(1, shape[1:]).transpose(2, 3)
    total = (steps * A.float()[:, None]).cumsum(-1)

    causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    # Above the diagonal the difference is positive and could overflow; it is masked before the exponential.
    decays = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp() * steps[..., None, :]
    scores = (queries @ keys.transpose(-1, -2)).repeat_interleave(heads // groups, 2)
    inside = (scores * decays).to(scores.dtype) @ values

    to_end = (total[..., -1:] - total).exp() * steps
    keys, queries = (t.repeat_interleave(heads // groups, 2) for t in (keys, queries))
    added = values.transpose(-1, -2) @ (keys * to_end[..., None].to(keys.dtype))
    state, before = torch.zeros_like(added[:, 0], dtype=torch.float32), []
    for c in range(shape[1]):
        before.append(state)
        state = state * total[:, c, :, -1].exp()[..., None, None] + added[:, c]
    carried = queries @ torch.stack(before, 1).transpose(-1, -2).to(queries.dtype)
    y = inside + carried * total.exp()[..., None].to(carried.dtype)
    y = y.transpose(2, 3).flatten(1, 2)[:, :tokens]
    return y if D is None else y + D[:, None] * x[:, :tokens]
