"""What a run of all strategies found: a table for each set of prompts and temperature, and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from draftwood.decode.measure import Outcome
from draftwood.decode.prompts import PromptSet
from draftwood.decode.propose import BeamTree, DynamicTree, JoinedTree, SampledTree, Settings
from draftwood.decode.report import TRANSFORMERS
from draftwood.decode.stats import DEFINITIONS, paired, summarize
from draftwood.models.tree import Tree

AUTOREGRESSIVE = "autoregressive"
PARTS = ("propose_s", "verify_s", "commit_s")
_MEANING = {
    "acceptance_length": DEFINITIONS["acceptance_length"],
    "interval": DEFINITIONS["interval"],
    "tokens_per_s": "new tokens / seconds of the whole call, prefill included; medians of the repeats, taking turns",
    "ratio": "tokens_per_s to that of the baseline: the fastest way without drafts, in any dtype of the run",
    "shares": "of the host's time in decode steps, prefill left out",
    "num_identical": "prompts whose greedy tokens are those of transformers' generate in the same dtype",
    "gains": (
        "the best tree over the best chain, both of the same draft in the same dtype; a ratio with its 95 % interval, "
        "percentile bootstrap of both over the same prompts. Best on these prompts: on others the tree gains less"
    ),
}


@dataclass(frozen=True)
class StrategyRow:
    """One strategy in one dtype. None: `shares` and acceptance of transformers, `num_identical` where sampled.

    `faults`: what cannot be a result.
    """

    strategy: str
    dtype: str
    acceptance_length: float | None
    interval: tuple[float, float] | None
    tokens_per_s: float
    ratio: float
    shares: dict[str, float] | None
    num_identical: int | None
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Gain:
    """The best tree over the best chain, best by `figure`, a field of `StrategyRow`; `interval` is that of the ratio,
    paired over prompts."""

    figure: str
    dtype: str
    tree: str
    chain: str
    ratio: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class StrategyTable:
    """All strategies on one set of prompts at one temperature."""

    prompts: str
    num_prompts: int
    temperature: float
    baseline: str
    rows: list[StrategyRow]
    gains: list[Gain]

    def table(self) -> Table:
        title = f"{self.prompts}, {self.num_prompts} prompts, temperature {self.temperature:g}"
        is_greedy = self.rows[0].num_identical is not None
        table = Table(
            title=title, caption="\n".join(self.notes()), box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False
        )
        names = ["strategy", "dtype", "acceptance", "tok/s", "ratio", "host %"]
        for name in names + (["identical"] if is_greedy else []):
            table.add_column(name, no_wrap=True)
        for row in self.rows:
            low, high = row.interval or (0.0, 0.0)
            length = "" if row.interval is None else f"{row.acceptance_length:.2f} ({low:.2f}-{high:.2f})"
            shares = "" if row.shares is None else "/".join(f"{100 * share:.0f}" for share in row.shares.values())
            cells = [
                row.strategy.removesuffix(" generate"),
                row.dtype,
                length,
                f"{row.tokens_per_s:.1f}",
                f"{row.ratio:.2f}x",
                shares,
            ]
            table.add_row(*cells, *([f"{row.num_identical} of {self.num_prompts}"] if is_greedy else []))
        return table

    def notes(self) -> list[str]:
        return [
            f"acceptance length with 95 % interval; ratios to {self.baseline}; host: propose/verify/commit",
            *(
                f"best tree over best chain by {gain.figure}, {gain.dtype}: {gain.tree} over {gain.chain}, "
                f"{_percent(gain.ratio)} ({' to '.join(map(_percent, gain.interval))})"
                for gain in self.gains
            ),
            *(f"FAULT, {row.strategy} in {row.dtype}: {fault}" for row in self.rows for fault in row.faults),
        ]


@dataclass(frozen=True)
class DecodeBenchmark:
    settings: dict[str, Any]
    tables: list[StrategyTable]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = [asdict(table) for table in self.tables]
        whole = {"settings": self.settings, "definitions": _MEANING, "tables": tables}
        path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def make_table(
    prompts: PromptSet,
    temperature: float,
    outcomes: Mapping[tuple[str, str], Sequence[Outcome]],
    trees: Mapping[str, Settings],
    seed: int,
) -> StrategyTable:
    """The table of what was measured.

    Args:
        outcomes: those of all prompts, by strategy and dtype, with transformers and our loop without drafts.
        trees: what the strategies that fill a draft's tree fill, by name.
        seed: of the bootstrap.
    """
    speeds = {way: sum(len(o.tokens) for o in got) / sum(o.seconds for o in got) for way, got in outcomes.items()}
    best = max((way for way in speeds if way[0] in (TRANSFORMERS, AUTOREGRESSIVE)), key=speeds.__getitem__)
    rows = []
    for (strategy, dtype), got in outcomes.items():
        own = outcomes[TRANSFORMERS, dtype]
        summary = summarize([o.stats for o in got], seed=seed) if any(o.stats.forwards for o in got) else None
        rows.append(
            StrategyRow(
                strategy,
                dtype,
                None if summary is None else summary.acceptance_length,
                None if summary is None else summary.acceptance_length_interval,
                speeds[strategy, dtype],
                speeds[strategy, dtype] / speeds[best],
                _shares(got),
                sum(a.tokens == b.tokens for a, b in zip(got, own, strict=True)) if temperature == 0 else None,
                summary.faults if summary is not None and strategy in trees else [],
            )
        )
    baseline = f"{best[0]} in {best[1]}"
    return StrategyTable(
        prompts.name, len(prompts.prompts), temperature, baseline, rows, _gains(rows, outcomes, trees, seed)
    )


def _shares(outcomes: Sequence[Outcome]) -> dict[str, float] | None:
    spent = {part.removesuffix("_s"): sum(o.timings.get(part, 0.0) for o in outcomes) for part in PARTS}
    total = sum(spent.values())
    return {part: seconds / total for part, seconds in spent.items()} if total else None


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _counts(outcomes: Sequence[Outcome], figure: str) -> list[tuple[float, float]]:
    """What `figure` is the ratio of, for each prompt."""
    if figure == "tokens_per_s":
        return [(len(o.tokens), o.seconds) for o in outcomes]
    return [(o.stats.emitted, len(o.stats.forwards)) for o in outcomes]


def _gains(
    rows: list[StrategyRow],
    outcomes: Mapping[tuple[str, str], Sequence[Outcome]],
    trees: Mapping[str, Settings],
    seed: int,
) -> list[Gain]:
    gains = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        # What lookup adds is not the draft's.
        own = {name for name, tree in trees.items() if not isinstance(tree, JoinedTree)}
        filled = [row for row in rows if row.dtype == dtype and row.strategy in own]
        chains = [row for row in filled if is_chain(trees[row.strategy])]
        bushy = [row for row in filled if not is_chain(trees[row.strategy])]
        for figure in ("acceptance_length", "tokens_per_s") if chains and bushy else ():
            tree, chain = (max(kind, key=attrgetter(figure)) for kind in (bushy, chains))
            counts = [_counts(outcomes[row.strategy, dtype], figure) for row in (chain, tree)]
            pair = paired(*counts, seed=seed)
            gains.append(Gain(figure, dtype, tree.strategy, chain.strategy, pair.ratio, pair.ratio_interval))
    return gains


def is_chain(tree: Settings) -> bool:
    """Whether no node can have two children."""
    if isinstance(tree, Tree):
        return all(len(below) < 2 for below in tree.children())
    if isinstance(tree, SampledTree):
        return max(tree.widths) == 1
    return (isinstance(tree, BeamTree) and tree.beams == 1) or (isinstance(tree, DynamicTree) and tree.top_k == 1)
