"""Which tokens of a drawn chain are kept: block verification (Sun et al., arXiv 2403.10444, algorithm 2), no model.

With x_1..x_k drawn one after another from q, p the target's distribution and w_0 = 1, the chain weighs, after i drafts,

    w_i = min(1, w_{i-1} p(x_i) / q(x_i)),

so that a draft that the target likes more than the draft did makes up for one before it, which token by token is lost.
The kept length is the last i whose coin falls right. With r_i = max(w_i p - q, 0), over the tokens after i drafts, it
does so with probability sum(r_i) / (sum(r_i) + 1 - w_i), or w_k after all k. The bonus token is drawn from r_i,
normalised, or from p after all k. Never fewer tokens are expected than by rejection token by token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.decode.tree import Tree
from draftwood.decode.verify import Acceptance, draw_one


class Stops(NamedTuple):
    """Where a chain may end: `chance` [B, k+1] of the coin after i drafts, `rest` [B, k+1, V] the bonus token's weights
    there, not normalised."""

    chance: Tensor
    rest: Tensor


def stops(p: Tensor, q: Tensor, drafts: Tensor) -> Stops:
    """The rule for one chain per row.

    Args:
        p: [B, k+1, V], the target's distributions after 0 to k drafts.
        q: [B, k, V], those that the drafts were drawn from.
        drafts: [B, k] int64.
    """
    column = drafts[..., None]
    ratio = (p[:, :-1].gather(2, column) / q.gather(2, column)).squeeze(2).nan_to_num(0.0)
    weights = [torch.ones_like(p[:, 0, 0])]
    for i in range(drafts.shape[1]):
        weights.append((weights[-1] * ratio[:, i]).clamp(max=1))
    weight = torch.stack(weights, 1)
    left = (weight[:, :-1, None] * p[:, :-1] - q).clamp(min=0)
    mass = left.sum(-1)
    # No mass at weight 1: p is q, and a later coin falls right for sure but for rounding.
    is_open = mass + 1 - weight[:, :-1] > 0
    chance = torch.where(is_open, mass / (mass + 1 - weight[:, :-1]), 1.0)
    rest = torch.where((mass > 0)[..., None], left, p[:, :-1])
    return Stops(torch.cat([chance, weight[:, -1:]], 1), torch.cat([rest, p[:, -1:]], 1))


def verify_block(
    p: Tensor, q: Tensor, tokens: Tensor, tree: Tree, generator: torch.Generator | None = None
) -> Acceptance:
    """Keeps drafts of drawn chains: `tokens` [B, k+1] at the nodes of `tree`, p and q as `stops`; one host
    synchronisation."""
    batch, count = tokens.shape[0], tokens.shape[1] - 1
    chance, rest = stops(p, q, tokens[:, 1:])
    falls = torch.rand(batch, count, device=p.device, dtype=p.dtype, generator=generator) < chance[:, 1:]
    kept = (falls * torch.arange(1, count + 1, device=p.device)).amax(1)
    bonus = draw_one(rest[torch.arange(batch, device=p.device), kept], generator)
    (rows,) = tree.read(torch.cat([tokens, kept[:, None], bonus[:, None]], 1))
    lengths = [row[-2] for row in rows]
    return Acceptance(
        [list(range(length + 1)) for length in lengths],
        [[*row[1 : length + 1], row[-1]] for row, length in zip(rows, lengths, strict=True)],
        [length < count for length in lengths],
    )
