"""How many tokens a target forward yields: acceptance length, per-depth rates and intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

DEFINITIONS = {
    "acceptance_length": (
        "emitted tokens / target forwards, both after prefill, over all prompts together: accepted drafts + 1 per "
        "forward. The token that prefill yields is not counted; tokens after EOS or max_new_tokens are not emitted. "
        "Decoding without drafts gives exactly 1."
    ),
    "acceptance_length_per_prompt": "the same ratio per prompt, then the mean over prompts",
    "alpha": (
        "per depth d: of the forwards that kept d - 1 drafts and had drafts below them, the share in which one of "
        "these was kept. Forwards cut by EOS or max_new_tokens, or ended by a leaf of the tree, count up to there"
    ),
    "survival": "per depth d: the share of all forwards with drafts in which at least d drafts were kept",
    "interval": "95 %, percentile bootstrap over prompts",
}
# So many forwards with drafts and none kept: not a weak draft but a broken one (weights not loaded, wrong head).
FAULT_FORWARDS = 50


class ForwardStats(NamedTuple):
    """One target forward of one row.

    Attributes:
        emitted: tokens, cut at EOS and max_new_tokens.
        accepted: drafts among them.
        depth: levels of drafts the tree had, 0 without drafts.
        missed: drafts hung below the last kept one and none was right (false at a leaf or where the block was cut).
    """

    emitted: int
    accepted: int
    depth: int
    missed: bool


@dataclass
class RowStats:
    """The target forwards after prefill in which one row, or one prompt, was still being decoded."""

    forwards: list[ForwardStats] = field(default_factory=list)

    @property
    def emitted(self) -> int:
        return sum(f.emitted for f in self.forwards)

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per forward; NaN without a forward."""
        return self.emitted / len(self.forwards) if self.forwards else float("nan")


@dataclass(frozen=True)
class AcceptanceSummary:
    """Figures over prompts; see `DEFINITIONS`. Intervals are (low, high). `faults` says what cannot be a result."""

    acceptance_length: float
    acceptance_length_interval: tuple[float, float]
    acceptance_length_per_prompt: float
    acceptance_length_per_prompt_interval: tuple[float, float]
    alpha: list[float]
    survival: list[float]
    num_prompts: int
    num_forwards: int
    num_emitted: int
    faults: list[str]


def summarize(prompts: Sequence[RowStats], *, seed: int = 0, resamples: int = 2000) -> AcceptanceSummary:
    """Summary of the prompts that had a forward after prefill.

    Raises:
        ValueError: none of them had.
    """
    used = [p for p in prompts if p.forwards]
    if not used:
        raise ValueError("no target forward after prefill: max_new_tokens is 1 or every prompt ended at once")
    forwards = [f for p in used for f in p.forwards]
    emitted = np.array([p.emitted for p in used], dtype=np.float64)
    steps = np.array([len(p.forwards) for p in used], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(used), (resamples, len(used)))
    deepest = max(f.depth for f in forwards)
    drafted = [f for f in forwards if f.depth]
    kept = [sum(f.accepted >= d for f in drafted) for d in range(1, deepest + 1)]
    missed = [sum(f.accepted == d - 1 and f.missed for f in drafted) for d in range(1, deepest + 1)]
    reached = [d for d in range(deepest) if kept[d] + missed[d]]
    faults = []
    if len(drafted) >= FAULT_FORWARDS and not kept[0]:
        faults.append(
            f"acceptance length is exactly 1.00: none of the drafts of {len(drafted)} target forwards was kept. That "
            "is a fault, not a result: check that the draft's weights were loaded and belong to this target"
        )
    return AcceptanceSummary(
        acceptance_length=float(emitted.sum() / steps.sum()),
        acceptance_length_interval=_interval(emitted[drawn].sum(1) / steps[drawn].sum(1)),
        acceptance_length_per_prompt=float((emitted / steps).mean()),
        acceptance_length_per_prompt_interval=_interval((emitted / steps)[drawn].mean(1)),
        alpha=[kept[d] / (kept[d] + missed[d]) for d in reached],
        survival=[k / len(drafted) for k in kept],
        num_prompts=len(used),
        num_forwards=len(forwards),
        num_emitted=int(emitted.sum()),
        faults=faults,
    )


@dataclass(frozen=True)
class GroupSummary:
    """Acceptance length of some of the forwards, with its 95 % interval over the prompts that have any."""

    acceptance_length: float
    interval: tuple[float, float]
    num_prompts: int
    num_forwards: int


def summarize_groups(groups: Mapping[str, Sequence[RowStats]], *, seed: int = 0) -> dict[str, GroupSummary]:
    """One summary a group, in the order given; groups without a forward are left out."""
    summaries = {}
    for name, rows in groups.items():
        if any(row.forwards for row in rows):
            s = summarize(rows, seed=seed)
            summaries[name] = GroupSummary(
                s.acceptance_length, s.acceptance_length_interval, s.num_prompts, s.num_forwards
            )
    return summaries


# Lower ends of the ranges of context length that reports tell apart.
CONTEXTS = (0, 128, 512, 2048, 8192, 32768)


def by_context(prompt_tokens: Sequence[int], rows: Sequence[RowStats]) -> dict[str, list[RowStats]]:
    """Each prompt's forwards by how many tokens stood before the root: the prompt and what had been emitted."""
    groups: dict[str, list[RowStats]] = {}
    for low, high in zip(CONTEXTS, (*CONTEXTS[1:], None), strict=True):
        name = f"{low}+" if high is None else f"{low}-{high - 1}"
        for start, row in zip(prompt_tokens, rows, strict=True):
            context, inside = start, []
            for forward in row.forwards:
                if context >= low and (high is None or context < high):
                    inside.append(forward)
                context += forward.emitted
            if inside:
                groups.setdefault(name, []).append(RowStats(inside))
    return groups


@dataclass(frozen=True)
class Paired:
    """A figure against another on the same prompts: minus it, and over it, each with its 95 % interval."""

    difference: float
    interval: tuple[float, float]
    ratio: float
    ratio_interval: tuple[float, float]


def paired(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]], *, seed: int = 0, resamples: int = 2000
) -> Paired:
    """The acceptance length, or speed, of `second` against that of `first`.

    Each bootstrap sample draws prompts and takes both figures on them, so that hard prompts do not widen the interval.

    Args:
        first, second: (emitted tokens, target forwards) of each prompt; for speeds (tokens, seconds).

    Raises:
        ValueError: a different number of prompts, or none with a forward in both.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} prompts and {len(second)}: paired figures need the same ones")
    figures = np.array([(*a, *b) for a, b in zip(first, second, strict=True) if a[1] and b[1]], dtype=np.float64)
    if not len(figures):
        raise ValueError("no prompt with a target forward after prefill in both")
    drawn = figures[np.random.default_rng(seed).integers(0, len(figures), (resamples, len(figures)))].sum(1)
    sums = np.concatenate([figures.sum(0, keepdims=True), drawn])  # the prompts themselves, then every resample
    one, other = sums[:, 0] / sums[:, 1], sums[:, 2] / sums[:, 3]
    differences, ratios = other - one, other / one
    return Paired(float(differences[0]), _interval(differences[1:]), float(ratios[0]), _interval(ratios[1:]))


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
