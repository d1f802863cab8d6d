"""Several drafts of one target, or several trees of one draft, measured in one run, side by side in one table."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from draftwood.decode.certificate import hash_tensors
from draftwood.decode.evaluate import Draft as AnyDraft
from draftwood.decode.evaluate import evaluate_draftings, evaluate_drafts
from draftwood.decode.prompts import PromptSet
from draftwood.decode.propose import TreeSpec
from draftwood.decode.report import SPECULATIVE, Report
from draftwood.decode.stats import paired

if TYPE_CHECKING:
    from draftwood.models.draft_base import Draft
    from draftwood.models.target import Target

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

_ROWS = {
    "acceptance_length": "acceptance length",
    "interval": "95 % interval",
    "tokens_per_second": "tokens per second",
    "speedup": "speed-up over the faster autoregressive baseline",
    "identical": "output identical to transformers' generate",
}


class Settings(Protocol):
    """What is measured: the `evaluate` section of a configuration."""

    @property
    def tree(self) -> str: ...

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class Comparison:
    """One report for each draft or tree, by name, over the same prompts; all are compared with the first."""

    reports: dict[str, Report]

    def figures(self) -> dict[str, dict[str, Any]]:
        """For each the five figures of the table."""
        figures = {}
        for name, report in self.reports.items():
            figures[name] = {
                "acceptance_length": report.acceptance.acceptance_length,
                "interval": list(report.acceptance.acceptance_length_interval),
                "tokens_per_second": report.tokens_per_s[SPECULATIVE],
                "speedup": report.speedup,
                "identical": None if report.num_identical is None else not report.mismatches,
            }
        return figures

    def differences(self) -> dict[str, dict[str, Any]]:
        """For each but the first: its acceptance length `against` the first's, as `stats.Paired`."""
        counts = {
            name: [(prompt.emitted, prompt.forwards) for prompt in report.prompts]
            for name, report in self.reports.items()
        }
        first, *others = counts
        return {name: {"against": first, **asdict(paired(counts[first], counts[name]))} for name in others}

    def rows(self) -> list[list[str]]:
        figures = self.figures()
        rows = [[label, *(_text(values[key]) for values in figures.values())] for key, label in _ROWS.items()]
        if len(self.reports) > 1:
            first, against = next(iter(self.reports)), self.differences().values()
            rows[2:2] = [
                [
                    f"paired {label} {first}, 95 % interval",
                    "",
                    *(f"{d[figure]:{form}} ({d[low_high][0]:{form}} to {d[low_high][1]:{form}})" for d in against),
                ]
                for label, figure, low_high, form in (
                    ("difference to", "difference", "interval", "+.3f"),
                    ("ratio to", "ratio", "ratio_interval", ".3f"),
                )
            ]
        return rows

    def caption(self) -> str:
        report = next(iter(self.reports.values()))
        speeds = ", ".join(f"{way} {speed:.1f}" for way, speed in report.tokens_per_s.items() if way != SPECULATIVE)
        settings = report.settings
        shared = [
            settings[key]
            for key in ("draft", "tree")
            if all(other.settings[key] == settings[key] for other in self.reports.values())
        ]
        return (
            f"{settings['target']}, {settings['dtype']}, {len(report.prompts)} prompts ({report.name}), "
            f"{settings['max_new_tokens']} new tokens, temperature {settings['temperature']:g}, "
            f"{''.join(f'{text}, ' for text in shared)}{settings['device']}, {settings['threads']} threads"
            + (f"; tokens per second without drafts: {speeds}" if speeds else "")
            + "".join(
                f"\nFAULT, {name}: {fault}" for name, one in self.reports.items() for fault in one.acceptance.faults
            )
        )

    def table(self) -> Table:
        table = Table("", *self.reports, caption=self.caption())
        for row in self.rows():
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        header = ["", *self.reports]
        lines = [header, ["---"] * len(header), *self.rows()]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"{table}\n\n{self.caption()}\n"

    def save(self, folder: Path, name: str = "report") -> Path:
        """Writes `<name>.md` and `<name>.json`; returns the latter.

        The JSON has one object for each draft or tree with the figures of the table, those against the first under
        `differences`, and the whole reports under `reports`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self.to_markdown(), encoding="utf-8")
        path = folder / f"{name}.json"
        whole = {
            **self.figures(),
            "differences": self.differences(),
            "reports": {way: report.to_dict() for way, report in self.reports.items()},
        }
        path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        return path


def compare_drafts(
    target: "Target",
    drafts: "Mapping[str, Draft[Any]]",
    prompts: PromptSet,
    settings: Settings,
    folder: Path,
    console: Console | None = None,
) -> Comparison:
    """Measures `drafts` and both baselines in one run; a journal in `folder` lets an interrupted one go on."""
    with Progress(*_COLUMNS, console=console) as progress:
        task = progress.add_task(f"{prompts.name}: prompts", total=None)  # later turns are counted too
        reports = evaluate_drafts(
            target,
            drafts,
            prompts,
            tree=settings.tree,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            journal=folder / "evaluation.jsonl",
            identity=" ".join(hash_tensors(dict(draft.state_dict())) for draft in drafts.values()),
            on_prompt=lambda done, count: progress.update(task, completed=done, total=count),
        )
    return Comparison(reports)


def compare_trees(
    target: "Target", draft: AnyDraft, trees: Mapping[str, TreeSpec], prompts: PromptSet, **settings: Any
) -> Comparison:
    """Measures `trees` of one draft in one run; settings and errors as `evaluate_draftings`."""
    return Comparison(
        evaluate_draftings(target, {name: (draft, tree) for name, tree in trees.items()}, prompts, **settings)
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"{value[0]:.2f} to {value[1]:.2f}"
    return "not measured" if value is None else f"{value:.2f}"
