"""Which drafted tokens are kept: pure functions, no model.

At a node the target says p, the distribution of the token that follows the node's path, and the draft has hung
children below the node, chosen without chance. The rule, greedy or sampled, is one: draw a token from p; if it is a
child, go down to it and draw again there; else emit it and stop. Every emitted token, the last one included, was
drawn from the target's own p at its place, so the output has the distribution of decoding one token at a time,
whatever the draft proposes and in whatever order. Greedy decoding is the case where p has one token.

This equals the usual "accept child x with probability p(x), else set p(x) to zero, renormalise and try the next", with
no remainder to divide by, hence no case in which nothing remains.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from draftwood.decode.tree import Tree

# `choose(nodes [B])` -> tokens [B] int64: for each row the token drawn at one node of its tree.
Choose = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sampling:
    """How p is made from logits, in the order and with the ties of transformers: temperature, top-k, top-p.

    Raises:
        ValueError: the setting at fault and its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; expected 1 or more, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected more than 0 and at most 1, or None")
        if self.is_greedy and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p have no meaning at temperature 0; set a temperature or leave them out")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """p [.., V], float32 or float64, of the target's `logits` [.., V] at a temperature above 0."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # The largest score becomes 0, so that no temperature, however small, makes an infinity of it.
        scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            smallest_kept = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
        p = scores.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ascending, order = p.sort(dim=-1)
            dropped = ascending.cumsum(-1) <= 1 - self.top_p
            dropped[..., -1] = False
            p = p.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0)
            p = p / p.sum(-1, keepdim=True)
        return p

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One token per row of `logits` [B, V]: [B] int64."""
        if self.is_greedy:
            return logits.argmax(-1)
        return draw_one(self.probs(logits), generator)


def draw_one(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One column for each row of `weights` [B, V], drawn in their proportion: [B] int64; -1 where they are not numbers.

    Where the cumulative weights pass a uniform number: one pass over the columns and no question to the device, which
    `torch.multinomial` asks several, and draws as many exponential variables as there are columns.
    """
    if has_torch_function_unary(weights):  # a mode that answers with every outcome in turn
        return handle_torch_function(draw_one, (weights,), weights, generator)
    passed = weights.cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(weights), 1, dtype=torch.float64, device=weights.device, generator=generator)
    # To the right of equal entries, so never a column of weight 0.
    drawn = torch.searchsorted(passed, uniform * passed[:, -1:], right=True)
    return torch.where(passed[:, -1:].isfinite(), drawn, -1).squeeze(1)


class Acceptance(NamedTuple):
    """What one verification keeps, per row.

    Attributes:
        paths: the kept nodes, from the root down to the last accepted one.
        emitted: the tokens drawn at these nodes: the accepted drafts, then the bonus token.
        missed: whether the last kept node had children, none of which was drawn (false: it was a leaf).
    """

    paths: list[list[int]]
    emitted: list[list[int]]
    missed: list[bool]


def accept(tokens: Tensor, tree: Tree, choose: Choose) -> Acceptance:
    """Walks every row's tree from the root as far as the drawn tokens are children; one host synchronisation.

    Args:
        tokens: [B, n] int64, the tokens at the nodes.
        tree: shared, or one per row.
        choose: the token drawn at a node; asked once for each node of the path, and for rows that have ended as well
            (their answer is ignored). Of two children with one token the first wins.
    """
    links = tree.links(tokens.device)
    node = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
    going = torch.ones_like(node, dtype=torch.bool)
    nodes, drawn = [], []
    for _ in range(tree.max_depth + 1):
        token = choose(node)
        is_match = (links == node[:, None]) & (tokens == token[:, None])
        going = going & is_match.any(1)
        node = torch.where(going, is_match.int().argmax(1), node)
        nodes.append(torch.where(going, node, -1))
        drawn.append(token)
        if is_free_to_ask(node.device) and not going.any():
            break
    missed = (links == node[:, None]).any(1, keepdim=True)
    levels, choices, last = tree.read(torch.stack(nodes, 1), torch.stack(drawn, 1), missed.long())
    paths = [[0, *(n for n in row if n >= 0)] for row in levels]
    emitted = [row[: len(path)] for row, path in zip(choices, paths, strict=True)]
    return Acceptance(paths, emitted, [bool(m) for (m,) in last])


def is_free_to_ask(device: torch.device) -> bool:
    """Whether to ask if all rows are done; a GPU would stall for longer than the remaining levels take."""
    return device.type == "cpu"


def verify_greedy(logits: Tensor, tokens: Tensor, tree: Tree) -> Acceptance:
    """As `accept`, with the argmax of the target's `logits` [B, n, V] as the token drawn at a node; the host walks."""
    choices, drafted = tree.read(logits.argmax(-1), tokens)
    kept = Acceptance([], [], [])
    for row, (chosen, drafts) in enumerate(zip(choices, drafted, strict=True)):
        if row == 0 or tree.num_rows > 1:
            children = tree.children(row)
        path, emitted = [0], [chosen[0]]
        while below := [node for node in children[path[-1]] if drafts[node] == emitted[-1]]:
            path.append(below[0])
            emitted.append(chosen[below[0]])
        kept.paths.append(path)
        kept.emitted.append(emitted)
        kept.missed.append(bool(children[path[-1]]))
    return kept


def verify_sampled(
    logits: Tensor, tokens: Tensor, tree: Tree, sampling: Sampling, generator: torch.Generator | None = None
) -> Acceptance:
    """Keeps the drafts that tokens drawn from p, made of the target's `logits` [B, n, V], agree with; see `accept`."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    return accept(tokens, tree, lambda node: sampling.draw(logits[rows, node], generator))
