"""Every strategy on the same prompts in one run, beside the best decoding without drafts."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.decode.answers import with_later_turns
from draftwood.decode.evaluate import describe_machine, our_way, transformers_way
from draftwood.decode.measure import Journal, Way, measure
from draftwood.decode.prompts import PromptSet
from draftwood.decode.propose import (
    Lookahead,
    Lookup,
    SampledTree,
    Settings,
    check_temperature,
    resolve_tree,
)
from draftwood.decode.propose.plan import Plan
from draftwood.decode.report import TRANSFORMERS
from draftwood.decode.strategy_table import AUTOREGRESSIVE, DecodeBenchmark, make_table
from draftwood.decode.verify import Sampling
from draftwood.models.medusa import MedusaDraft

if TYPE_CHECKING:
    from draftwood.models.target import Target

PLAN = "plan"
_CHOSEN = ("chain-4", "stree", "eagle-25", "dynamic-8", "dynamic-16", "dynamic-16+lookup", "beam-3x4")
_DRAWN = ("sampled-1x4", "sampled-3x4", "sampled-4-2-1-1")
_OF_MEDUSA = ("product-4x2x2", "medusa-63")
_WITHOUT_DRAFT = ("lookup", "lookahead")


def default_strategies(draft: Any, has_plan: bool = False) -> tuple[str, ...]:
    """All that apply to `draft`; with None those that need none."""
    medusa = _OF_MEDUSA if isinstance(draft, MedusaDraft) else ()
    drafted = () if draft is None else (*_CHOSEN, *_DRAWN, *medusa)
    return (AUTOREGRESSIVE, *drafted, *_WITHOUT_DRAFT, *((PLAN,) if has_plan else ()))


def check_settings(
    strategies: Sequence[str],
    temperatures: Sequence[float],
    max_new_tokens: int,
    repeats: int,
    *,
    has_draft: bool = True,
    has_plan: bool = True,
) -> dict[str, Settings]:
    """What each strategy fills, by name; "autoregressive" and "plan" are left out.

    Raises:
        ValueError: a number out of its range, or a strategy that there is not or that cannot run.
    """
    # One token comes from the prompt; strategies differ in what follows.
    for name, value, least in (("max_new_tokens", max_new_tokens, 2), ("repeats", repeats, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}; expected {least} or more")
    if not temperatures:
        raise ValueError("no temperature; expected one or more")
    for temperature in temperatures:
        Sampling(temperature)
    for values in (strategies, temperatures):
        if twice := sorted({str(value) for value in values if values.count(value) > 1}):
            raise ValueError(f"{', '.join(twice)}: given more than once")
    trees = {name: _resolve(name) for name in strategies if name not in (AUTOREGRESSIVE, PLAN)}
    for tree in trees.values():
        check_temperature(tree, max(temperatures))
    drafted = [name for name in strategies if name == PLAN or (name in trees and not _is_draftless(trees[name]))]
    if drafted and not has_draft:
        without = ", ".join((AUTOREGRESSIVE, *_WITHOUT_DRAFT))
        raise ValueError(f"strategies {', '.join(drafted)} need a draft, and there is none; {without} do not")
    if PLAN in strategies and not has_plan:
        raise ValueError("strategy plan: the draft has no plan for any of the dtypes; `draftwood plan` makes one")
    return trees


def _resolve(name: str) -> Settings:
    if near := difflib.get_close_matches(name, (AUTOREGRESSIVE, PLAN), 1, 0.7):
        raise ValueError(f"no strategy '{name}'; did you mean '{near[0]}'?")
    return resolve_tree(name)


def _is_draftless(tree: Settings) -> bool:
    return isinstance(tree, Lookup | Lookahead)


def benchmark_decode(
    models: Mapping[str, tuple["Target", Any]],
    prompt_sets: Sequence[PromptSet],
    *,
    strategies: Sequence[str] | None = None,
    strategy_dtypes: Sequence[str] | None = None,
    plans: Mapping[str, Plan] | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 128,
    repeats: int = 1,
    seed: int = 0,
    journals: Path | None = None,
    identity: str = "",
    on_progress: Callable[[str], None] = lambda _: None,
) -> DecodeBenchmark:
    """Runs all strategies in turn, prompt by prompt, beside transformers' generate and our loop without drafts.

    Later turns of conversations are prompts too, see `with_later_turns`.

    Args:
        models: target and draft, or None for it, by dtype; decoding without drafts is measured in all of them.
        strategy_dtypes: those of `models` that the other strategies run in; None: all.
        strategies: None: `default_strategies`. Drawn trees are left out at temperature 0.
        plans: by dtype; the strategy "plan" runs where there is one.
        journals: folder of files that keep each prompt's outcomes, so that an interrupted run goes on where it was.
        identity: names the draft's weights in the journals.

    Raises:
        ValueError: as `check_settings`.
    """
    plans, drafting = plans or {}, tuple(strategy_dtypes or models)
    if unknown := [dtype for dtype in drafting if dtype not in models]:
        raise ValueError(f"strategy dtypes {', '.join(unknown)}: not among the dtypes {', '.join(models)}")
    target, draft = next(iter(models.values()))
    strategies = tuple(strategies or default_strategies(draft, bool(plans)))
    trees = check_settings(
        strategies, temperatures, max_new_tokens, repeats, has_draft=draft is not None, has_plan=bool(plans)
    )
    settings = {
        "target": target.name,
        "draft": "none" if draft is None else type(draft).__name__,
        "draft_identity": identity,
        "strategies": list(strategies),
        "trees": {name: str(tree) for name, tree in trees.items()},
        "plans": {dtype: plan.to_dict() for dtype, plan in plans.items()},
        "temperatures": list(temperatures),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "seed": seed,
        **describe_machine(target),
        "dtype": list(models),
        "strategy_dtypes": list(drafting),
    }
    filled = {name: tree for name, tree in trees.items() if not _is_draftless(tree)}
    tables = []
    for asked in prompt_sets:
        prompts = with_later_turns(target, draft, asked, max_new_tokens=max_new_tokens)
        for temperature in temperatures:
            ways = _ways(models, drafting, strategies, trees, plans, temperature, max_new_tokens)
            texts = [prompt.input_ids.tolist() for prompt in prompts.prompts]
            measured = {"settings": settings, "prompts": texts, "temperature": temperature}
            path = None if journals is None else journals / f"{prompts.name}-{temperature:g}.jsonl"
            outcomes = measure(
                {" ".join(way): run for way, run in ways.items()},
                prompts.prompts,
                Journal(path, measured),
                device=target.device,
                seed=seed,
                repeats=repeats,
                on_prompt=_announce(on_progress, f"{prompts.name}, temperature {temperature:g}"),
            )
            by_way = {way: [outcome[" ".join(way)] for outcome in outcomes] for way in ways}
            tables.append(make_table(prompts, temperature, by_way, filled, seed))
    return DecodeBenchmark(settings, tables)


def _announce(on_progress: Callable[[str], None], title: str) -> Callable[[int, int], None]:
    return lambda done, total: on_progress(f"{title}: {done} of {total} prompts")


def _ways(
    models: Mapping[str, tuple["Target", Any]],
    drafting: Sequence[str],
    strategies: Sequence[str],
    trees: Mapping[str, Settings],
    plans: Mapping[str, Plan],
    temperature: float,
    max_new_tokens: int,
) -> dict[tuple[str, str], Way]:
    """By strategy and dtype; transformers and our loop without drafts are always among them."""
    ways: dict[tuple[str, str], Way] = {}
    common: dict[str, Any] = dict(max_new_tokens=max_new_tokens, temperature=temperature)
    for name in dict.fromkeys((TRANSFORMERS, AUTOREGRESSIVE, *strategies)):
        for dtype, (target, draft) in models.items():
            if name == TRANSFORMERS:
                ways[name, dtype] = transformers_way(target, max_new_tokens, Sampling(temperature))
            elif name == AUTOREGRESSIVE:
                ways[name, dtype] = our_way(target, None, **common)
            elif dtype not in drafting:
                continue
            elif name == PLAN and dtype in plans:
                ways[name, dtype] = our_way(target, draft, tree=plans[dtype], **common)
            elif name in trees and not (temperature == 0 and isinstance(trees[name], SampledTree)):
                ways[name, dtype] = our_way(target, draft, tree=trees[name], **common)
    return ways
