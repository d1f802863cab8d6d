"""Several drafts of one target measured in one run, side by side in one table."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from draftwood.decode.evaluate import evaluate_drafts
from draftwood.decode.prompts import PromptSet
from draftwood.decode.report import SPECULATIVE, Report
from draftwood.decode.stats import paired_difference

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

    tree: str
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True)
class Comparison:
    """One report for each draft, by name, over the same prompts."""

    reports: dict[str, Report]

    def figures(self) -> dict[str, dict[str, Any]]:
        """For each draft the five figures of the table."""
        figures = {}
        for name, report in self.reports.items():
            figures[name] = {
                "acceptance_length": report.acceptance.acceptance_length,
                "interval": list(report.acceptance.acceptance_length_interval),
                "tokens_per_second": report.tokens_per_s[SPECULATIVE],
                "speedup": report.speedup,
                "identical": not report.mismatches,
            }
        return figures

    def differences(self) -> dict[str, dict[str, Any]]:
        """For each draft but the first: its acceptance length minus the first's on the same prompts, with interval."""
        counts = {
            name: [(prompt.emitted, prompt.forwards) for prompt in report.prompts]
            for name, report in self.reports.items()
        }
        first, *others = counts
        differences = {}
        for name in others:
            value, interval = paired_difference(counts[first], counts[name])
            differences[name] = {"against": first, "difference": value, "interval": list(interval)}
        return differences

    def rows(self) -> list[list[str]]:
        figures = self.figures()
        rows = [[label, *(_text(values[key]) for values in figures.values())] for key, label in _ROWS.items()]
        if len(self.reports) > 1:
            paired = [
                f"{d['difference']:+.3f} ({d['interval'][0]:+.3f} to {d['interval'][1]:+.3f})"
                for d in self.differences().values()
            ]
            first = next(iter(self.reports))
            rows.insert(2, [f"paired difference to {first}, 95 % interval", "", *paired])
        return rows

    def caption(self) -> str:
        report = next(iter(self.reports.values()))
        speeds = ", ".join(f"{way} {speed:.1f}" for way, speed in report.tokens_per_s.items() if way != SPECULATIVE)
        settings = report.settings
        return (
            f"{settings['target']}, {settings['dtype']}, {len(report.prompts)} prompts ({report.name}), "
            f"{settings['max_new_tokens']} new tokens, temperature {settings['temperature']:g}, {settings['tree']}, "
            f"{settings['device']}, {settings['threads']} threads; tokens per second without drafts: {speeds}"
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

    def save(self, folder: Path) -> Path:
        """Writes `report.md` and `report.json`; returns the latter.

        The JSON has one object for each draft with the figures of the table, and the whole reports under `reports`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").write_text(self.to_markdown(), encoding="utf-8")
        path = folder / "report.json"
        whole = {
            **self.figures(),
            "differences": self.differences(),
            "reports": {name: report.to_dict() for name, report in self.reports.items()},
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
    digest = sha256()
    for draft in drafts.values():
        for tensor in draft.state_dict().values():
            digest.update(tensor.detach().cpu().float().numpy().tobytes())
    with Progress(*_COLUMNS, console=console) as progress:
        task = progress.add_task(f"{prompts.name}: prompts", total=len(prompts.prompts))
        reports = evaluate_drafts(
            target,
            drafts,
            prompts,
            tree=settings.tree,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            journal=folder / "evaluation.jsonl",
            identity=digest.hexdigest(),
            on_prompt=lambda done, _: progress.update(task, completed=done),
        )
    return Comparison(reports)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"{value[0]:.2f} to {value[1]:.2f}"
    return "not measured" if value is None else f"{value:.2f}"
