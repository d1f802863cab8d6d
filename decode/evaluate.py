"""Acceptance length, speed and losslessness of a draft on a set of prompts, one prompt at a time."""

import platform
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

import draftwood
from draftwood.decode.answers import with_later_turns
from draftwood.decode.generate import GenerateOutput, generate, own_eos
from draftwood.decode.measure import Journal, Outcome, Way, measure
from draftwood.decode.prompts import Prompt, PromptSet
from draftwood.decode.propose import Proposer, TreeSpec, resolve_tree
from draftwood.decode.propose.base import Drafter
from draftwood.decode.report import LOOP, SPECULATIVE, TRANSFORMERS, Mismatch, PromptRecord, Report
from draftwood.decode.stats import GroupSummary, RowStats, by_context, summarize, summarize_groups
from draftwood.decode.verify import Sampling

if TYPE_CHECKING:
    from draftwood.models.target import Target

Draft = Drafter | Proposer | None  # of any kind
Drafting = tuple[Draft, TreeSpec]  # a draft and the tree that it fills


def evaluate(
    target: "Target",
    draft: Draft,
    prompts: PromptSet,
    **settings: Any,
) -> Report:
    """One draft on one set of prompts; `tree`, settings and errors as `evaluate_drafts`."""
    return evaluate_drafts(target, {"draft": draft}, prompts, **settings)["draft"]


def evaluate_drafts(
    target: "Target", drafts: Mapping[str, Draft], prompts: PromptSet, *, tree: TreeSpec = None, **settings: Any
) -> dict[str, Report]:
    """Several drafts that fill one kind of tree; settings and errors as `evaluate_draftings`."""
    return evaluate_draftings(target, {name: (draft, tree) for name, draft in drafts.items()}, prompts, **settings)


def evaluate_draftings(
    target: "Target",
    draftings: Mapping[str, Drafting],
    prompts: PromptSet,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    baseline: bool = True,
    repeats: int = 1,
    journal: Path | None = None,
    identity: str = "",
    on_prompt: Callable[[int, int], None] | None = None,
) -> dict[str, Report]:
    """Decodes every prompt with each draft and tree and, with `baseline`, without, by our loop and transformers'
    generate. Later turns of conversations are prompts too, see `with_later_turns`.

    Args:
        draftings: by name; a report comes back for each.
        max_new_tokens, temperature, top_k, top_p: as `generate`; transformers gets the same.
        seed: of the sampling (prompt i uses seed + i) and of the bootstrap.
        repeats: times each way is run on a prompt; the median time counts.
        journal: file that keeps each prompt's outcome, so that an interrupted evaluation goes on where it was.
        identity: names the drafts' weights in the journal; outcomes of others are not taken over.
        on_prompt: called with (prompts done, prompts).

    Raises:
        ValueError: repeats below 1, or a setting that `generate` refuses.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; expected 1 or more")
    sampling = Sampling(temperature, top_k, top_p)
    first, _ = next(iter(draftings.values()))
    prompts = with_later_turns(target, first, prompts, max_new_tokens=max_new_tokens)
    common = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    ways: dict[str, Way] = {
        # lookup and lookahead draft without a draft: None must not
        f"{SPECULATIVE}: {name}": our_way(target, draft, tree=None if draft is None else tree, **common)
        for name, (draft, tree) in draftings.items()
    }
    if baseline:
        ways[LOOP] = our_way(target, None, **common)
        ways[TRANSFORMERS] = transformers_way(target, max_new_tokens, sampling)
    settings = {
        name: {
            **_describe(target, draft, tree),
            **common,
            "seed": seed,
            "repeats": repeats,
            "prompts left out as too long": prompts.num_too_long,
        }
        for name, (draft, tree) in draftings.items()
    }
    measured = {
        "settings": settings,
        "drafts": identity,
        "prompts": [prompt.input_ids.tolist() for prompt in prompts.prompts],
        "ways": list(ways),
    }
    book = Journal(journal, measured)
    outcomes = measure(
        ways, prompts.prompts, book, device=target.device, seed=seed, repeats=repeats, on_prompt=on_prompt
    )
    return {name: _report(target, name, prompts, outcomes, settings[name], sampling, baseline) for name in draftings}


def _report(
    target: "Target",
    draft: str,
    prompts: PromptSet,
    outcomes: list[dict[str, Outcome]],
    settings: dict[str, Any],
    sampling: Sampling,
    baseline: bool,
) -> Report:
    """The report on one of the drafts that were measured together."""
    ways = {SPECULATIVE: f"{SPECULATIVE}: {draft}"} | ({LOOP: LOOP, TRANSFORMERS: TRANSFORMERS} if baseline else {})
    mine = [{label: row[way] for label, way in ways.items()} for row in outcomes]
    speeds = {way: sum(len(row[way].tokens) for row in mine) / sum(row[way].seconds for row in mine) for way in ways}
    fastest = max((LOOP, TRANSFORMERS), key=speeds.__getitem__) if baseline else None
    stats = [row[SPECULATIVE].stats for row in mine]
    is_compared = baseline and sampling.is_greedy
    mismatches = [
        _mismatch(target, number, prompt.input_ids, row[SPECULATIVE].tokens, row[TRANSFORMERS].tokens)
        for number, (prompt, row) in enumerate(zip(prompts.prompts, mine, strict=True))
        if is_compared and row[SPECULATIVE].tokens != row[TRANSFORMERS].tokens
    ]
    return Report(
        name=prompts.name,
        settings=settings,
        acceptance=summarize(stats, seed=settings["seed"]),
        by_category=_by_category(prompts.prompts, stats),
        groups=_groups(prompts.prompts, stats, settings["seed"]),
        tokens_per_s=speeds,
        prompts=[_record(prompt, row) for prompt, row in zip(prompts.prompts, mine, strict=True)],
        speedup=speeds[SPECULATIVE] / speeds[fastest] if fastest else None,
        baseline=fastest,
        num_identical=len(mine) - len(mismatches) if is_compared else None,
        mismatches=mismatches,
    )


def our_way(target: "Target", draft: Draft, **settings: Any) -> Way:
    """Our `generate` with these settings."""

    def run(ids: Tensor, seed: int, **changed: Any) -> GenerateOutput:
        return generate(target, draft, ids, seed=seed, **{**settings, **changed})

    return run


def transformers_way(target: "Target", max_new_tokens: int, sampling: Sampling) -> Way:
    """`transformers_generate`, from a seed."""

    def run(ids: Tensor, seed: int, **changed: Any) -> list[int]:
        torch.manual_seed(seed)
        return transformers_generate(target, ids, changed.get("max_new_tokens", max_new_tokens), sampling)

    return run


@torch.no_grad()
def transformers_generate(target: "Target", input_ids: Tensor, max_new_tokens: int, sampling: Sampling) -> list[int]:
    """New tokens of one row [1, T] by transformers' own generate, with the target's own processors and `sampling`."""
    ends = own_eos(target)
    warping = dict(temperature=sampling.temperature, top_k=sampling.top_k or 0, top_p=sampling.top_p or 1.0)
    if sampling.is_greedy:
        warping = {}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=not sampling.is_greedy,
        num_beams=1,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **warping,
    )
    out = target.model.generate(input_ids, generation_config=config, attention_mask=torch.ones_like(input_ids))
    return out[0, input_ids.shape[1] :].tolist()


def _record(prompt: Prompt, row: dict[str, Outcome]) -> PromptRecord:
    mine = row[SPECULATIVE]
    return PromptRecord(
        name=prompt.name,
        category=prompt.category,
        prompt_tokens=prompt.input_ids.shape[1],
        new_tokens=len(mine.tokens),
        forwards=len(mine.stats.forwards),
        acceptance_length=mine.stats.acceptance_length if mine.stats.forwards else None,
        seconds={way: outcome.seconds for way, outcome in row.items()},
        emitted=mine.stats.emitted,
        turn=prompt.turn,
    )


def _mismatch(target: "Target", number: int, ids: Tensor, ours: list[int], theirs: list[int]) -> Mismatch:
    position, *tokens = first_difference(ours, theirs)
    ids = ids.to(target.device)
    context = torch.cat([ids, torch.tensor([ours[:position]], dtype=ids.dtype, device=ids.device)], dim=1)
    top = target.head(target.features(context)[:, -1]).float().topk(2).values[0]
    return Mismatch(number, position, tuple(tokens), float(top[0] - top[1]))  # type: ignore[arg-type]


def first_difference(ours: list[int], theirs: list[int]) -> tuple[int, int | None, int | None]:
    """Where two different texts part, and the token of each there; None where it has ended."""
    shared = min(len(ours), len(theirs))
    position = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    mine, other = (text[position] if position < len(text) else None for text in (ours, theirs))
    return position, mine, other


def _by_category(prompts: list[Prompt], stats: list[RowStats]) -> dict[str, float]:
    groups: dict[str, list[RowStats]] = defaultdict(list)
    for prompt, row in zip(prompts, stats, strict=True):
        if row.forwards:
            groups[prompt.category].append(row)
    if len(groups) < 2:
        return {}
    return {category: summarize(rows, resamples=1).acceptance_length for category, rows in sorted(groups.items())}


def _groups(prompts: list[Prompt], stats: list[RowStats], seed: int) -> dict[str, dict[str, GroupSummary]]:
    """Acceptance by task, turn and context length; of one group alone nothing is said."""
    tasks: dict[str, list[RowStats]] = defaultdict(list)
    turns: dict[str, list[RowStats]] = defaultdict(list)
    for prompt, row in sorted(zip(prompts, stats, strict=True), key=lambda pair: (pair[0].category, pair[0].turn)):
        tasks[prompt.category or "none"].append(row)
        turns[str(prompt.turn)].append(row)
    contexts = by_context([prompt.input_ids.shape[1] for prompt in prompts], stats)
    kinds = {"task": tasks, "turn": dict(sorted(turns.items())), "context": contexts}
    summaries = {kind: summarize_groups(groups, seed=seed) for kind, groups in kinds.items()}
    return {kind: groups for kind, groups in summaries.items() if len(groups) > 1}


def _describe(target: "Target", draft: Any, tree: TreeSpec) -> dict[str, Any]:
    settings = None if draft is None else resolve_tree(tree)
    return {
        "target": target.name,
        "draft": "none" if draft is None else type(draft).__name__,
        "tree": "no drafts" if settings is None else f"{tree} {settings}" if isinstance(tree, str) else str(settings),
        **describe_machine(target),
    }


def describe_machine(target: "Target") -> dict[str, Any]:
    """What a figure depends on besides its models: `dtype`, `device`, `threads` and `versions`."""
    device = target.device
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "versions": {
            "draftwood": draftwood.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
