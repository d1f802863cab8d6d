"""Which drafted tokens are kept when the drafts were drawn by chance: recursive rejection, no model. Chains: `block`.

At a node the target says p and the draft says q, two distributions of the token that follows. The children were drawn
from q without replacement, and are tried in the order in which they were drawn:

    a child x is accepted with probability min(1, p(x) / q(x)), and decoding goes down to it;
    a rejected one leaves p <- normalise(max(p - q, 0)), what of p the draft could not have given,
    and q <- q without x, renormalised: the distribution that the next child was drawn from.

Where all are rejected, or there are none, the bonus token is drawn from what remains of p. Each trial keeps the emitted
token's distribution at p (speculative sampling, arXiv 2211.17192), so the whole does (arXiv 2402.12374). The order
matters: siblings sorted by probability were not drawn from the q they would be tried against, and the output is biased.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.decode.block import verify_block
from draftwood.decode.tree import Tree
from draftwood.decode.verify import Acceptance, Sampling, draw_one, is_free_to_ask


@dataclass(frozen=True)
class Draws:
    """What the children of a tree's nodes were drawn from. Siblings are in node order, which is the drawn order.

    Attributes:
        log_q: [B, m, Vd] log-probabilities, one row per node that has children.
        slot: [B, n] int64, which row of `log_q` is a node's; any for a leaf.
        width: the most children that a node has.
        vocab: [Vd] int64, the target's token of each column; None: they are the target's tokens. q is 0 elsewhere.
    """

    log_q: Tensor
    slot: Tensor
    width: int
    vocab: Tensor | None = None

    def at(self, node: Tensor, vocab_size: int) -> Tensor:
        """log q [B, V] over the target's vocabulary at one node of each row, `node` [B]."""
        rows = torch.arange(len(node), device=node.device)
        log_q = self.log_q[rows, self.slot[rows, node]]
        if self.vocab is None:
            return log_q
        return log_q.new_full((len(node), vocab_size), -torch.inf).index_copy_(1, self.vocab, log_q)


def draw_without_replacement(log_q: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """`k` different columns of log_q [.., Vd] in drawn order, [.., k] int64: each from what q the earlier ones leave.

    Gumbel top-k (arXiv 1903.06059): -log of an exponential variable is a Gumbel variable.
    """
    noise = torch.empty_like(log_q).exponential_(generator=generator)
    return (log_q - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()).topk(k, dim=-1).indices


class Trial(NamedTuple):
    """One child tried: `chance` [B] of its acceptance; `p` [B, V] and `log_q` [B, V] should it be rejected."""

    chance: Tensor
    p: Tensor
    log_q: Tensor


def try_child(p: Tensor, log_q: Tensor, token: Tensor) -> Trial:
    """The rule for one child per row.

    A token that q could not have given is not accepted and leaves p as it was. Where p - q has no mass left, which only
    rounding can bring about since p = q is always accepted, p stays as well.

    Args:
        p: [B, V], what remains of the target's distribution.
        log_q: [B, V], log of the distribution the child was drawn from, up to a constant per row.
        token: [B] int64.
    """
    column = token[:, None]
    # From the logarithms anew each time: what is left of q may be smaller than a float can be.
    q = log_q.to(p.dtype).softmax(-1).nan_to_num(0.0)
    q_token = q.gather(1, column)
    was_drawn = q_token > 0
    chance = torch.where(was_drawn, p.gather(1, column) / q_token, 0).clamp(max=1)
    rest = (p - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    rest = torch.where(was_drawn & (mass > 0), rest / mass, p)
    return Trial(chance.squeeze(1), rest, log_q.scatter(1, column, -torch.inf))


def verify_drawn(
    logits: Tensor,
    tokens: Tensor,
    tree: Tree,
    draws: Draws,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Acceptance:
    """Keeps drawn drafts: of a chain by block verification, else by recursive rejection from the root down; one host
    synchronisation.

    Args:
        logits: [B, n, V], the target's at the nodes.
        tokens: [B, n] int64, the tokens at the nodes.
        tree: shared, or one per row.
        draws: what the children were drawn from, at the temperature of `sampling` or any other.
        sampling: how p is made, at a temperature above 0.
        generator: of the trials and the bonus token.
    """
    batch, device = tokens.shape[0], tokens.device
    if draws.width == 1 and not tree.is_padded:  # a chain: every node but the last has one child, the next node
        levels = torch.arange(tree.num_nodes - 1, device=device)[:, None].expand(-1, batch)
        q = torch.stack([draws.at(node, logits.shape[-1]) for node in levels], 1).softmax(-1)
        p = sampling.probs(logits)
        return verify_block(p, q.to(p.dtype), tokens, tree, generator)
    rows, links = torch.arange(batch, device=device), tree.links(tokens.device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    going = torch.ones_like(node, dtype=torch.bool)
    bonus, nodes = node, []
    for _ in range(tree.max_depth + 1):
        p, log_q = sampling.probs(logits[rows, node]), draws.at(node, logits.shape[-1])
        # The children first, in node order; behind them nodes that are none.
        is_child, children = (links == node[:, None]).expand(batch, -1).int().sort(dim=1, descending=True, stable=True)
        down = torch.full_like(node, -1)
        for child, is_one in zip(children.T[: draws.width], is_child.bool().T, strict=False):
            trial = try_child(p, log_q, tokens[rows, child])
            is_tried = is_one & (down < 0)
            is_accepted = is_tried & (torch.rand(batch, device=device, generator=generator) < trial.chance)
            down = torch.where(is_accepted, child, down)
            is_rejected = (is_tried & ~is_accepted)[:, None]
            p, log_q = torch.where(is_rejected, trial.p, p), torch.where(is_rejected, trial.log_q, log_q)
        drawn = draw_one(p, generator)
        bonus = torch.where(going & (down < 0), drawn, bonus)
        going = going & (down >= 0)
        node = torch.where(going, down, node)
        nodes.append(torch.where(going, node, -1))
        if is_free_to_ask(device) and not going.any():
            break
    missed = (links == node[:, None]).any(1)
    walked, texts, ends = tree.read(torch.stack(nodes, 1), tokens, torch.stack([bonus, missed.long()], 1))
    paths = [[0, *(n for n in row if n >= 0)] for row in walked]
    emitted = [[*(texts[b][n] for n in path[1:]), ends[b][0]] for b, path in enumerate(paths)]
    return Acceptance(paths, emitted, [bool(is_missed) for _, is_missed in ends])
