"""Acceptance length, speed and losslessness of a draft on a set of prompts, one prompt at a time."""

import platform
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

import draftwood
from draftwood.decode.generate import GenerateOutput, generate, own_eos
from draftwood.decode.prompts import Prompt, PromptSet
from draftwood.decode.propose import Proposer, TreeSpec, resolve_tree
from draftwood.decode.report import LOOP, SPECULATIVE, TRANSFORMERS, Mismatch, PromptRecord, Report
from draftwood.decode.stats import RowStats, summarize
from draftwood.decode.verify import Sampling

if TYPE_CHECKING:
    from draftwood.models.draft import EagleDraft
    from draftwood.models.target import Target

WARMUP_TOKENS = 4


def evaluate(
    target: "Target",
    draft: "EagleDraft | Proposer | None",
    prompts: PromptSet,
    *,
    tree: TreeSpec = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    baseline: bool = True,
    repeats: int = 1,
    on_prompt: Callable[[int, int], None] | None = None,
) -> Report:
    """Decodes every prompt with the draft and, with `baseline`, without it, by our loop and by transformers' generate.

    The ways take turns, in an order that rotates from prompt to prompt, so that a machine that slows down slows all.

    Args:
        tree, max_new_tokens, temperature, top_k, top_p: as `generate`; transformers gets the same.
        seed: of the sampling (prompt i uses seed + i) and of the bootstrap.
        repeats: times each way is run on a prompt; the median time counts.
        on_prompt: called with (prompts done, prompts).

    Raises:
        ValueError: repeats below 1, or a setting that `generate` refuses.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; expected 1 or more")
    sampling = Sampling(temperature, top_k, top_p)
    common = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)

    def with_drafts(ids: Tensor, seed: int, **changed: Any) -> GenerateOutput:
        return generate(target, draft, ids, tree=tree, seed=seed, **{**common, **changed})

    def own_loop(ids: Tensor, seed: int, **changed: Any) -> GenerateOutput:
        return generate(target, None, ids, seed=seed, **{**common, **changed})

    def by_transformers(ids: Tensor, seed: int, **changed: Any) -> list[int]:
        torch.manual_seed(seed)
        return transformers_generate(target, ids, changed.get("max_new_tokens", max_new_tokens), sampling)

    ways: dict[str, Callable[..., Any]] = {SPECULATIVE: with_drafts}
    if baseline:
        ways |= {LOOP: own_loop, TRANSFORMERS: by_transformers}
    for run in ways.values():
        run(prompts.prompts[0].input_ids.to(target.device), seed, max_new_tokens=WARMUP_TOKENS)

    records, stats, mismatches = [], [], []
    tokens = dict.fromkeys(ways, 0)
    seconds = dict.fromkeys(ways, 0.0)
    for number, prompt in enumerate(prompts.prompts):
        ids = prompt.input_ids.to(target.device)
        times: dict[str, list[float]] = {way: [] for way in ways}
        outputs: dict[str, Any] = {}
        for repeat in range(repeats):
            for way in _rotated(list(ways), number + repeat):
                started = perf_counter()
                outputs[way] = ways[way](ids, seed + number)
                times[way].append(perf_counter() - started)
        texts = {way: out if isinstance(out, list) else out.tokens[0] for way, out in outputs.items()}
        for way in ways:
            tokens[way] += len(texts[way])
            seconds[way] += median(times[way])
        stats.append(outputs[SPECULATIVE].rows[0])
        medians = {way: median(times[way]) for way in ways}
        records.append(_record(prompt, len(texts[SPECULATIVE]), stats[-1], medians))
        if baseline and sampling.is_greedy and texts[SPECULATIVE] != texts[TRANSFORMERS]:
            mismatches.append(_mismatch(target, number, ids, texts[SPECULATIVE], texts[TRANSFORMERS]))
        if on_prompt is not None:
            on_prompt(number + 1, len(prompts.prompts))

    speeds = {way: tokens[way] / seconds[way] for way in ways}
    fastest = max((LOOP, TRANSFORMERS), key=speeds.__getitem__) if baseline else None
    return Report(
        name=prompts.name,
        settings={
            **_describe(target, draft, tree),
            **common,
            "seed": seed,
            "repeats": repeats,
            "prompts left out as too long": prompts.num_too_long,
        },
        acceptance=summarize(stats, seed=seed),
        by_category=_by_category(prompts.prompts, stats),
        tokens_per_s=speeds,
        prompts=records,
        speedup=speeds[SPECULATIVE] / speeds[fastest] if fastest else None,
        baseline=fastest,
        num_identical=len(records) - len(mismatches) if baseline and sampling.is_greedy else None,
        mismatches=mismatches,
    )


@torch.no_grad()
def transformers_generate(target: "Target", input_ids: Tensor, max_new_tokens: int, sampling: Sampling) -> list[int]:
    """New tokens of one row [1, T] by transformers' own generate, with nothing but `sampling` applied to the logits."""
    ends = own_eos(target)
    warping = dict(temperature=sampling.temperature, top_k=sampling.top_k or 0, top_p=sampling.top_p or 1.0)
    if sampling.is_greedy:
        warping = {}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=not sampling.is_greedy,
        num_beams=1,
        repetition_penalty=1.0,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **warping,
    )
    out = target.model.generate(input_ids, generation_config=config, attention_mask=torch.ones_like(input_ids))
    return out[0, input_ids.shape[1] :].tolist()


def _rotated(ways: list[str], by: int) -> list[str]:
    by %= len(ways)
    return ways[by:] + ways[:by]


def _record(prompt: Prompt, new_tokens: int, stats: RowStats, seconds: dict[str, float]) -> PromptRecord:
    return PromptRecord(
        name=prompt.name,
        category=prompt.category,
        prompt_tokens=prompt.input_ids.shape[1],
        new_tokens=new_tokens,
        forwards=len(stats.forwards),
        acceptance_length=stats.acceptance_length if stats.forwards else None,
        seconds=seconds,
    )


def _mismatch(target: "Target", number: int, ids: Tensor, ours: list[int], theirs: list[int]) -> Mismatch:
    shared = min(len(ours), len(theirs))
    position = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    context = torch.cat([ids, torch.tensor([ours[:position]], dtype=ids.dtype, device=ids.device)], dim=1)
    top = target.head(target.features(context)[:, -1]).float().topk(2).values[0]
    tokens = tuple(text[position] if position < len(text) else None for text in (ours, theirs))
    return Mismatch(number, position, tokens, float(top[0] - top[1]))  # type: ignore[arg-type]


def _by_category(prompts: list[Prompt], stats: list[RowStats]) -> dict[str, float]:
    groups: dict[str, list[RowStats]] = defaultdict(list)
    for prompt, row in zip(prompts, stats, strict=True):
        if row.forwards:
            groups[prompt.category].append(row)
    if len(groups) < 2:
        return {}
    return {category: summarize(rows, resamples=1).acceptance_length for category, rows in sorted(groups.items())}


def _describe(target: "Target", draft: Any, tree: TreeSpec) -> dict[str, Any]:
    device = target.device
    settings = None if draft is None else resolve_tree(tree)
    return {
        "target": target.name,
        "draft": "none" if draft is None else type(draft).__name__,
        "tree": "no drafts" if settings is None else f"{tree} {settings}" if isinstance(tree, str) else str(settings),
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
