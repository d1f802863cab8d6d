"""How many tokens a target forward yields: acceptance length, per-depth rates and intervals."""

from collections.abc import Sequence
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


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
