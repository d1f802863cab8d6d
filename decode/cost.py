"""What a decoding step costs on this machine: verification by tree size, drafting by levels and nodes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from draftwood.decode.optimal_tree import decreasing
from draftwood.decode.propose import DynamicTree, make_proposer
from draftwood.models.timing import elapsed_ms
from draftwood.models.tree import Tree

if TYPE_CHECKING:
    from draftwood.models.target import Target

SIZES = (2, 4, 8, 16, 32, 64)  # nodes of the trees that are verified, the root among them
_DRAFTED = (  # static trees that are drafted, of different levels and nodes
    Tree.chain(1),
    Tree.chain(3),
    Tree.chain(6),
    Tree.from_parents([-1] + [0] * 4 + [n for n in range(1, 5) for _ in range(4)]),
    Tree.from_parents([-1] + [0] * 8 + [n for n in range(1, 9) for _ in range(4)]),
)
_DYNAMIC_LEVELS = (2, 4, 6)
_AUTOREGRESSIVE = ("autoregressive",)


@dataclass(frozen=True)
class Costs:
    """Medians in ms, at batch size 1.

    Attributes:
        autoregressive: of a step without drafts.
        verify: (nodes, ms) of a verification and its commit, by increasing nodes.
        static: ms per tree, level and draft node of drafting a static tree, the draft's update included.
        dynamic: ms per tree and level of a dynamic one; None where the draft grows none.
        spread: upper over lower quartile of the times of a step, the median over all steps; near 1 on an idle machine.
    """

    autoregressive: float
    verify: list[tuple[int, float]]
    static: tuple[float, float, float]
    dynamic: tuple[float, float] | None = None
    spread: float = 1.0

    def verify_ms(self, nodes: int) -> float:
        """Linear between the sizes measured, smoothed so that a larger tree never costs less than a smaller one."""
        sizes, times = zip(*self.verify, strict=True)
        return float(np.interp(nodes, sizes, decreasing(times[::-1], [1.0] * len(times))[::-1]))

    def static_step(self, drafts: int, levels: int) -> float:
        """Of a whole step with a static tree."""
        base, per_level, per_node = self.static
        return self.verify_ms(drafts + 1) + base + per_level * levels + per_node * drafts

    def dynamic_step(self, drafts: int, levels: int) -> float:
        """Of a whole step with a dynamic tree."""
        assert self.dynamic is not None, "a draft that grows no dynamic tree"
        return self.verify_ms(drafts + 1) + self.dynamic[0] + self.dynamic[1] * levels

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_costs(
    models: dict[str, tuple["Target", Any]], prompt: Tensor, *, repeats: int = 7, sizes: Sequence[int] = SIZES
) -> dict[str, Costs]:
    """Every step of every (target, draft) in turn, again and again, so that a machine that slows down slows all.

    Args:
        prompt: [1, T] int64, the context of the steps.
    """
    steps: dict[tuple[str, Any], Callable[[], object]] = {}
    for name, (target, draft) in models.items():
        for key, step in _steps(target, draft, prompt, sizes).items():
            steps[name, key] = step
    times: dict[tuple[str, Any], list[float]] = {key: [] for key in steps}
    for step in steps.values():  # the first run of each allocates
        step()
    # The step that all others are compared with is run more often, spread over the round.
    often = [key for key in steps if key[1] == _AUTOREGRESSIVE]
    order = [key for number, key in enumerate(steps) for key in ([key, *often] if number % 5 == 0 else [key])]
    for _ in range(repeats):
        for key in order:
            times[key].append(elapsed_ms(models[key[0]][0].device, steps[key]))
    medians = {key: median(values) for key, values in times.items()}
    quartiles = [np.percentile(values, [25, 75]) for values in times.values()]
    spread = median(float(high / low) for low, high in quartiles)
    return {
        name: replace(_costs({key: ms for (owner, key), ms in medians.items() if owner == name}), spread=spread)
        for name in models
    }


def _costs(ms: dict[Any, float]) -> Costs:
    verify = sorted((key[1], value) for key, value in ms.items() if key[0] == "verify")
    static = [(key[1], value) for key, value in ms.items() if key[0] == "static"]
    dynamic = [(key[1], value) for key, value in ms.items() if key[0] == "dynamic"]
    fitted = _fit([[1, tree.max_depth, tree.num_nodes - 1] for tree, _ in static], [value for _, value in static])
    grown = _fit([[1, levels] for levels, _ in dynamic], [value for _, value in dynamic]) if dynamic else None
    return Costs(ms[_AUTOREGRESSIVE], verify, fitted, grown)


def _fit(rows: list[list[float]], values: list[float]) -> Any:
    """Relative least squares with coefficients of 0 or more; those that come out negative are left out."""
    used = list(range(len(rows[0])))
    scale = 1 / np.array(values)
    while True:
        matrix = np.array(rows, dtype=np.float64)[:, used]
        found, *_ = np.linalg.lstsq(matrix * scale[:, None], np.array(values) * scale, rcond=None)
        if len(used) == 1 or found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    coefficients = [0.0] * len(rows[0])
    for column, value in zip(used, found, strict=True):
        coefficients[column] = max(0.0, float(value))
    return tuple(coefficients)


@torch.no_grad()
def _steps(target: "Target", draft: Any, prompt: Tensor, sizes: Sequence[int]) -> dict[Any, Callable[[], object]]:
    prompt = prompt.to(target.device)
    state = target.prefill(prompt)
    features = state.features
    tokens = prompt[0, torch.arange(max(sizes)) % prompt.shape[1]][None]
    steps: dict[Any, Callable[[], object]] = {_AUTOREGRESSIVE: lambda: target.step(state, tokens[:, 0])}
    for nodes in sizes:
        tree = _spread(nodes)

        def verify(tree: Tree = tree, nodes: int = nodes) -> None:
            target.verify(state, tokens[:, :nodes], tree)
            target.commit(state, [[0, 1]])

        steps["verify", nodes] = verify
    specs: list[tuple[Any, Any]] = [(("static", tree), tree) for tree in _DRAFTED]
    if makes_dynamic(draft):
        specs += [(("dynamic", levels), DynamicTree(levels=levels)) for levels in _DYNAMIC_LEVELS]
    for key, spec in specs:
        steps[key] = _drafting(draft, spec, prompt, features)
    return steps


def makes_dynamic(draft: Any) -> bool:
    """Whether the draft can be asked for nodes anywhere in a tree: one with heads for a few places cannot."""
    return getattr(draft, "max_depth", None) is None


def _drafting(draft: Any, spec: Any, prompt: Tensor, features: Tensor) -> Callable[[], object]:
    proposer = make_proposer(draft, spec)
    assert proposer is not None, "a draft and no strategy"
    with torch.no_grad():
        proposer.start(prompt, [prompt.shape[1]], features, prompt[:, 0])

    @torch.no_grad()
    def run() -> None:
        proposal = proposer.propose(99)
        nodes = proposal.tree.num_nodes
        proposer.advance(proposal.tokens, features[:, :1].expand(-1, nodes, -1), [[0, 1]], prompt[:, 0])

    return run


def _spread(nodes: int) -> Tree:
    """A tree of so many nodes, each inner one with three children."""
    return Tree.from_parents([-1, *((node - 1) // 3 for node in range(1, nodes))])
