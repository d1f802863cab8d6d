"""`draftwood plan`: which tree is fastest with this draft on this machine, by how much, and whether any is."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from draftwood.decode.acceptance import (
    LEVELS,
    Observation,
    acceptance_table,
    dynamic_tokens,
    observe,
    wide_tree,
)
from draftwood.decode.cost import Costs, makes_dynamic, measure_costs
from draftwood.decode.evaluate import describe_machine
from draftwood.decode.optimal_tree import best_tree, expected_tokens
from draftwood.decode.propose import DynamicTree, JoinedTree
from draftwood.decode.propose.plan import FILE, FORMAT, Plan
from draftwood.models.checkpoint import weights_sha256
from draftwood.models.tree import Tree

if TYPE_CHECKING:
    from draftwood.models.target import Target

BUSY = 1.5  # spread of the times above which something else was running
MAX_NODES = 60  # draft nodes of a tree
RESAMPLES = 500


@dataclass(frozen=True)
class Planning:
    """Attributes:
    plans: by dtype.
    settings: what was measured, on what.
    """

    plans: dict[str, Plan]
    settings: dict[str, Any]

    @property
    def best(self) -> str:
        """The dtype that gives most tokens per second, with drafts or without."""
        return min(self.plans, key=self._ms_per_token)

    def _ms_per_token(self, dtype: str) -> float:
        plan = self.plans[dtype]
        return min(plan.step_ms / plan.tokens_per_step, plan.autoregressive_ms)

    @property
    def fastest_autoregressive(self) -> str:
        return min(self.plans, key=lambda dtype: self.plans[dtype].autoregressive_ms)

    def verdict(self) -> str:
        plan = self.plans[self.best]
        base = self.plans[self.fastest_autoregressive].autoregressive_ms
        over_best = base * plan.tokens_per_step / plan.step_ms
        if not plan.is_worthwhile or over_best <= 1:
            return "do not speculate: decoding without drafts is faster on this machine"
        text = f"speculate in {self.best}: {over_best:.2f}x the fastest decoding without drafts"
        if plan.interval[0] < 1:
            text += "; not certain, the interval reaches below 1"
        return text

    @property
    def warning(self) -> str:
        """That the times can't be relied on, or nothing."""
        spread = max(plan.details["costs_ms"]["spread"] for plan in self.plans.values())
        if spread <= BUSY:
            return ""
        return f"the machine was busy: the times of a step vary by {spread:.1f}x; plan again when it is idle"

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "best": self.best,
            "verdict": self.verdict(),
            "warning": self.warning,
            "settings": self.settings,
            "plans": {dtype: plan.to_dict() for dtype, plan in self.plans.items()},
        }

    def save(self, path: str | Path) -> Path:
        """Writes a file, or `plan.json` in a folder."""
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return path

    def table(self) -> Table:
        caption = f"{self.settings['device']}, batch 1, predicted. {self.warning}".strip()
        table = Table("", *self.plans, title=self.verdict(), caption=caption)
        plans = self.plans.values()
        table.add_row("tree", *(_name(plan.tree) for plan in plans))
        table.add_row("tokens per step", *(f"{plan.tokens_per_step:.2f}" for plan in plans))
        table.add_row("step, ms", *(f"{plan.step_ms:.1f}" for plan in plans))
        table.add_row("step without drafts, ms", *(f"{plan.autoregressive_ms:.1f}" for plan in plans))
        table.add_row("speed-up in this dtype", *(f"{plan.speedup:.2f}" for plan in plans))
        table.add_row("on prompts that did not choose the tree (95 %)", *map(_held_out, plans))
        table.add_row("speculate", *("yes" if plan.is_worthwhile else "[bold]no[/bold]" for plan in plans))
        return table


def make_plan(
    models: "dict[str, tuple[Target, Any]]",
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int = 48,
    temperature: float = 0.0,
    repeats: int = 7,
    seed: int = 0,
    folder: str | Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Planning:
    """Measures costs in every dtype and acceptance in the first, and finds the best tree for each dtype.

    Args:
        models: (target, draft) by the name of their dtype.
        prompts: [1, T] int64 each.
        max_new_tokens: tokens decoded for each prompt to observe acceptance.
        temperature: at which acceptance is observed.
        repeats: timed runs of each step.
        seed: of sampling and bootstrap.
        folder: the draft's, or its name: the plan is bound to the weights there.

    Raises:
        ValueError: no step with drafts was observed, because every text ended too soon.
    """
    say = on_progress or (lambda _: None)
    say("costs")
    costs = measure_costs(models, max(prompts, key=lambda ids: ids.shape[1]), repeats=repeats)
    target, draft = next(iter(models.values()))
    common: dict[str, Any] = dict(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    say("acceptance by depth and rank")
    seen = observe(target, draft, prompts, wide_tree(), **common)
    if not any(o.trials.any() for o in seen):
        raise ValueError(f"no step with drafts in {len(prompts)} prompts of {max_new_tokens} new tokens: give more")
    grown: list[Observation] = []
    if makes_dynamic(draft):
        say("acceptance of a dynamic tree")
        grown = observe(target, draft, prompts, DynamicTree(levels=LEVELS, budget=MAX_NODES), **common)
    machine = describe_machine(target)
    settings = {
        "target": target.name,
        "draft": getattr(draft, "kind", type(draft).__name__),
        "draft_sha256": None if folder is None else weights_sha256(folder),
        "device": machine["device"],
        "threads": torch.get_num_threads(),
        "versions": machine["versions"],
        "prompts": len(prompts),
        **common,
    }
    plans = {dtype: _plan(costs[dtype], draft, seen, grown, seed) for dtype in models}
    by_tree: dict[str, list[str]] = {}
    for dtype, plan in plans.items():
        by_tree.setdefault(str(plan.to_dict()["tree"]), []).append(dtype)
    for dtypes in by_tree.values():
        alone = plans[dtypes[0]].tree
        joined = JoinedTree(alone)  # type: ignore[arg-type]
        say(f"acceptance with lookup, {_name(alone)}")
        seen_of = [observe(target, draft, prompts, one, **common) for one in (alone, joined)]
        plans |= {dtype: _with_lookup(plans[dtype], joined, costs[dtype], *seen_of) for dtype in dtypes}
    return Planning(plans, settings)


@dataclass(frozen=True)
class _Choice:
    """A tree, the ms of its step, and the tokens per step it has on some of the prompts."""

    tree: Tree | DynamicTree
    step_ms: float
    tokens: Callable[[Sequence[int]], float]

    def to_dict(self, prompts: Sequence[int]) -> dict[str, Any]:
        tree = {"parents": self.tree.rows[0]} if isinstance(self.tree, Tree) else vars(self.tree)
        return {**tree, "tokens_per_step": self.tokens(prompts), "step_ms": self.step_ms}


def _plan(costs: Costs, draft: Any, seen: list[Observation], grown: list[Observation], seed: int) -> Plan:
    """The best tree on all prompts, with an interval from trees chosen on the other half of them.

    It is of the kind, static or dynamic, that does better on the other half: judged where it was chosen, a static tree
    looks better than it is, as there are more of them to choose from.
    """
    everything = range(len(seen))
    halves = [everything[0::2], everything[1::2]] if len(seen) > 1 else [everything]

    def speedup(choices: list[_Choice], prompts: Sequence[int]) -> float:
        """Of the halves, each with the tree that was chosen on the other one."""
        parts = [[i for i in prompts if i in half] for half in halves]
        speeds = [len(part) * c.tokens(part) / c.step_ms for part, c in zip(parts, choices, strict=True) if part]
        return sum(speeds) / len(prompts) * costs.autoregressive

    kinds: dict[str, Callable[[Sequence[int]], _Choice]] = {"static": lambda some: _static(costs, draft, seen, some)}
    if grown:
        kinds["dynamic"] = lambda some: _dynamic(costs, grown, some)
    best = {kind: choose(everything) for kind, choose in kinds.items()}
    others = {kind: [choose(half) for half in reversed(halves)] for kind, choose in kinds.items()}
    details: dict[str, Any] = {"costs_ms": costs.to_dict(), "acceptance": acceptance_table(seen)}
    for kind, choice in best.items():
        details[kind] = {**choice.to_dict(everything), "speedup_on_other_prompts": speedup(others[kind], everything)}
    kind = max(kinds, key=lambda kind: details[kind]["speedup_on_other_prompts"])
    details["speedup_on_other_prompts"] = details[kind]["speedup_on_other_prompts"]
    drawn = np.random.default_rng(seed).integers(0, len(seen), (RESAMPLES, len(seen)))
    low, high = np.percentile([speedup(others[kind], row.tolist()) for row in drawn], [2.5, 97.5])
    tokens = best[kind].tokens(everything)
    return Plan(best[kind].tree, tokens, best[kind].step_ms, costs.autoregressive, (float(low), float(high)), details)


def _static(costs: Costs, draft: Any, seen: list[Observation], prompts: Sequence[int]) -> _Choice:
    """The best static tree for some of the prompts."""
    levels = getattr(draft, "max_depth", None) or LEVELS

    def table(some: Sequence[int]) -> list[list[float]]:
        return acceptance_table([seen[i] for i in some])[:levels]

    best = best_tree(table(prompts), costs.static_step, MAX_NODES)
    tree = Tree.from_parents(best.parents)
    return _Choice(tree, best.step_ms, lambda some: expected_tokens(best.parents, table(some)))


def _dynamic(costs: Costs, grown: list[Observation], prompts: Sequence[int]) -> _Choice:
    """The best dynamic tree for some of the prompts."""

    def tokens(tree: DynamicTree, some: Sequence[int]) -> float:
        return dynamic_tokens([grown[i] for i in some], tree.budget, tree.levels)

    def step_ms(tree: DynamicTree) -> float:
        return costs.dynamic_step(tree.budget, tree.levels)

    trees = (DynamicTree(levels=l, budget=b) for l in range(1, LEVELS + 1) for b in range(1, MAX_NODES + 1))
    best = max(trees, key=lambda tree: tokens(tree, prompts) / step_ms(tree))
    return _Choice(best, step_ms(best), lambda some: tokens(best, some))


def _with_lookup(
    plan: Plan, joined: JoinedTree, costs: Costs, alone: list[Observation], together: list[Observation]
) -> Plan:
    """`plan` with its tree joined by lookup where that is faster by what was seen of the tree `alone` and `together`.

    A step costs what verifying the further nodes costs more; the interval is scaled by what lookup brings.
    """
    means = [np.array([step for o in seen for step in o.steps], dtype=np.float64) for seen in (alone, together)]
    if not all(map(len, means)):
        return plan
    (own_nodes, own_tokens), (nodes, tokens) = (steps.mean(0).tolist() for steps in means)
    step_ms = plan.step_ms + max(0.0, costs.verify_ms(nodes) - costs.verify_ms(own_nodes))
    more = tokens / own_tokens
    gain = more * plan.step_ms / step_ms
    found = {"nodes": nodes, "tokens_per_step": tokens, "without": own_tokens, "step_ms": step_ms, "gain": gain}
    details = {**plan.details, "lookup": found}
    if gain <= 1:
        return replace(plan, details=details)
    details["speedup_on_other_prompts"] *= gain
    low, high = plan.interval
    return replace(
        plan,
        tree=joined,
        tokens_per_step=plan.tokens_per_step * more,
        step_ms=step_ms,
        interval=(low * gain, high * gain),
        details=details,
    )


def _held_out(plan: Plan) -> str:
    return f"{plan.details['speedup_on_other_prompts']:.2f} ({plan.interval[0]:.2f} to {plan.interval[1]:.2f})"


def _name(tree: Any) -> str:
    if isinstance(tree, JoinedTree):
        return f"{_name(tree.tree)}, and lookup"
    if isinstance(tree, DynamicTree):
        return f"dynamic, {tree.budget} nodes, {tree.levels} levels"
    return f"static, {tree.num_nodes - 1} nodes, {tree.max_depth} levels"
