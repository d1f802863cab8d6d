"""Evidence that the acceptance rules are exact: every outcome of their random choices, on small vocabularies.

The rules themselves run, unchanged. While they do, the few functions with which they draw are answered from a
tree of outcomes that is walked to its end, each with its probability, so that what comes out is the rule's exact
distribution. A function that draws in another way is not answered, and the distribution then does not come out right.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftwood.decode import sampled, verify
from draftwood.decode.certificate import Evidence
from draftwood.models.tree import Tree

BOUND = 1e-6  # of the total variation, in float64
SETTINGS: tuple[dict[str, Any], ...] = (
    dict(temperature=1.0),
    dict(temperature=0.5),
    dict(temperature=1.5, top_p=0.7),
    dict(temperature=1.0, top_k=2),
    dict(temperature=0.7, top_k=3, top_p=0.9),
)
# Trees of the two rules: two levels, several children, one with a child of its own that is not the first.
STATIC, DRAWN = ([-1, 0, 0, 1, 1, 2], [-1, 0, 1], [-1, 0, 0, 0]), ([-1, 0, 0, 0], [-1, 0, 1], [-1, 0, 0, 2])
QUICK_STATIC, QUICK_DRAWN, QUICK_SETTINGS = STATIC[:1], DRAWN[2:], (SETTINGS[0], SETTINGS[4])
VOCAB, QUICK_VOCAB = 4, 3


# The probability that the comparison of a uniform number with a bound is true, and the same seen from the bound.
_COMPARISONS: dict[str, Callable[[float], float]] = {
    "lt": lambda bound: bound,
    "le": lambda bound: bound,
    "gt": lambda bound: 1 - bound,
    "ge": lambda bound: 1 - bound,
}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


class Outcomes(TorchFunctionMode):
    """Answers `draw_one` and comparisons with `torch.rand` with the outcomes of one branch."""

    def __init__(self, branch: list[list[int]]):
        super().__init__()
        self.branch, self.depth, self.weight = branch, 0, 1.0
        self.uniform: list[Tensor] = []

    def choose(self, weights: list[float]) -> int:
        """The branch's outcome of this choice; a new choice starts with its first possible outcome."""
        possible = [i for i, w in enumerate(weights) if w > 0]
        if self.depth == len(self.branch):
            self.branch.append([0, len(possible)])
        chosen = possible[self.branch[self.depth][0]]
        self.weight *= weights[chosen] / sum(weights)
        self.depth += 1
        return chosen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is verify.draw_one:
            return torch.tensor([self.choose(row) for row in args[0].tolist()])
        if func is torch.rand:
            made = func(*args, **kwargs)
            self.uniform.append(made)
            return made
        name = getattr(func, "__name__", "").strip("_") if self.uniform else ""
        if name in _COMPARISONS and len(args) == 2:
            mine = [any(a is u for u in self.uniform) for a in args]
            if any(mine):
                name, bound = (name, args[1]) if mine[0] else (_MIRRORED[name], args[0])
                chances = torch.as_tensor(bound, dtype=torch.float64).expand(args[1 - mine[0]].shape).clamp(0, 1)
                flat = [_COMPARISONS[name](float(c)) for c in chances.flatten()]
                return torch.tensor([self.choose([1 - c, c]) == 1 for c in flat]).view(chances.shape)
        return func(*args, **kwargs)


def every_outcome(run: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
    """(probability, result) of `run` for each combination of what its random choices can give."""
    branch: list[list[int]] = []
    while True:
        with Outcomes(branch) as outcomes:
            result = run()
        yield outcomes.weight, result
        while branch and branch[-1][0] + 1 == branch[-1][1]:
            branch.pop()
        if not branch:
            return
        branch[-1][0] += 1


class SmallModel:
    """Random distributions of the next token after every text, of a target and of a draft, in float64.

    The target's pass through transformers' own warpers.
    """

    def __init__(self, vocab: int, seed: int, settings: dict[str, Any]):
        self.vocab = vocab
        self.generator = torch.Generator().manual_seed(seed)
        self.logits: dict[tuple[int, ...], Tensor] = defaultdict(lambda: self._random(2.0))
        self.log_q: dict[tuple[int, ...], Tensor] = defaultdict(lambda: self._random(1.5).log_softmax(-1))
        warpers: list[Any] = [TemperatureLogitsWarper(settings["temperature"])]
        if "top_k" in settings:
            warpers.append(TopKLogitsWarper(settings["top_k"]))
        if "top_p" in settings:
            warpers.append(TopPLogitsWarper(settings["top_p"]))
        self.warp = LogitsProcessorList(warpers)
        self.p = cache(self._warped)  # text -> probabilities

    def _random(self, scale: float) -> Tensor:
        return torch.randn(self.vocab, generator=self.generator, dtype=torch.float64) * scale

    def _warped(self, text: tuple[int, ...]) -> list[float]:
        ids = torch.zeros(1, 1, dtype=torch.int64)
        return self.warp(ids, self.logits[text][None]).softmax(-1)[0].tolist()

    def chance(self, text: tuple[int, ...]) -> float:
        chance = 1.0
        for i, token in enumerate(text):
            chance *= self.p(text[:i])[token]
        return chance

    def variation(self, blocks: dict[tuple[int, ...], float], length: int) -> float:
        """Total variation between texts of `length` begun with `blocks` and continued by p, and those all from p."""
        distance = 0.0
        for text in itertools.product(range(self.vocab), repeat=length):
            got = sum(
                weight * self.chance(text) / max(self.chance(block), 1e-300)
                for block, weight in blocks.items()
                if text[: len(block)] == block and self.chance(block) > 0
            )
            distance += abs(got - self.chance(text))
        impossible = sum(weight for block, weight in blocks.items() if self.chance(block) == 0)
        return (distance + impossible) / 2

    def at_nodes(self, tree: Tree, tokens: Sequence[int]) -> Tensor:
        """[1, n, V] the target's logits after each node."""
        texts = [tuple(tokens[n] for n in tree.path(node)[1:]) for node in range(tree.num_nodes)]
        return torch.stack([self.logits[text] for text in texts])[None]


def static_variation(parents: list[int], settings: dict[str, Any], vocab: int, seed: int) -> float:
    """Total variation of the rule for trees chosen without chance, whichever tokens the tree holds."""
    model, tree, sampling = SmallModel(vocab, seed, settings), Tree.from_parents(parents), verify.Sampling(**settings)
    tokens = [0] * tree.num_nodes
    for node, below in enumerate(tree.children()):
        for rank, child in enumerate(below):
            tokens[child] = (seed + node + rank) % vocab
    logits, ids = model.at_nodes(tree, tokens), torch.tensor([tokens])
    blocks: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, kept in every_outcome(lambda: verify.verify_sampled(logits, ids, tree, sampling)):
        blocks[tuple(kept.emitted[0])] += weight
    return model.variation(blocks, tree.max_depth + 1)


def drawn_variation(parents: list[int], settings: dict[str, Any], vocab: int, seed: int) -> float:
    """Total variation of the rule for drawn trees, over every way in which the tree can have been drawn."""
    model, tree, sampling = SmallModel(vocab, seed, settings), Tree.from_parents(parents), verify.Sampling(**settings)
    blocks: dict[tuple[int, ...], float] = defaultdict(float)
    for share, tokens in _drawn_trees(model, tree):
        inner = [node for node, below in enumerate(tree.children()) if below]
        log_q = torch.stack([model.log_q[tuple(tokens[n] for n in tree.path(node)[1:])] for node in inner])[None]
        slot = torch.tensor([[inner.index(node) if node in inner else 0 for node in range(tree.num_nodes)]])
        draws = sampled.Draws(log_q, slot, max(map(len, tree.children())))
        logits, ids = model.at_nodes(tree, tokens), torch.tensor([tokens])

        def run(logits: Tensor = logits, ids: Tensor = ids, draws: sampled.Draws = draws) -> verify.Acceptance:
            return sampled.verify_drawn(logits, ids, tree, draws, sampling)

        for weight, kept in every_outcome(run):
            blocks[tuple(kept.emitted[0])] += share * weight
    return model.variation(blocks, tree.max_depth + 1)


def _drawn_trees(model: SmallModel, tree: Tree) -> Iterator[tuple[float, list[int]]]:
    """(probability, tokens) of every filling of `tree` by the draft, siblings drawn one after another."""

    def fill(node: int, tokens: list[int], share: float) -> Iterator[tuple[float, list[int]]]:
        if node == tree.num_nodes:
            yield share, list(tokens)
            return
        parent = tree.rows[0][node]
        q = model.log_q[tuple(tokens[n] for n in tree.path(parent)[1:])].exp().tolist()
        taken = [tokens[n] for n in tree.children()[parent] if n < node]
        left = 1 - sum(q[t] for t in taken)
        for token in range(model.vocab):
            if token not in taken:
                yield from fill(node + 1, [*tokens, token], share * q[token] / left)

    return fill(1, [0], 1.0)


def certify_rules(quick: bool = False, seed: int = 0) -> list[Evidence]:
    """Both acceptance rules by enumeration, over `SETTINGS`, or with `quick` over some of them."""
    evidence = []
    vocab = QUICK_VOCAB if quick else VOCAB
    for name, variation, trees in (
        ("acceptance rule, trees without chance", static_variation, QUICK_STATIC if quick else STATIC),
        ("acceptance rule, drawn trees", drawn_variation, QUICK_DRAWN if quick else DRAWN),
    ):
        cases = [
            {"tree": parents, **settings, "total_variation": variation(parents, settings, vocab, seed + number)}
            for number, (parents, settings) in enumerate(
                itertools.product(trees, QUICK_SETTINGS if quick else SETTINGS)
            )
        ]
        worst = max(case["total_variation"] for case in cases)
        detail = f"total variation at most {worst:.1e} in {len(cases)} enumerated cases, bound {BOUND:.0e}"
        evidence.append(Evidence(name, worst < BOUND, detail, {"vocabulary": vocab, "bound": BOUND, "cases": cases}))
    return evidence
