"""What an evaluation found, as JSON, Markdown and a table in the terminal. One report is about one set of prompts."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from draftwood.decode.stats import DEFINITIONS, AcceptanceSummary, GroupSummary

SPECULATIVE, LOOP, TRANSFORMERS = "with drafts", "own loop without drafts", "transformers generate"
_SPEED = (
    "new tokens (EOS included) / seconds of the whole call, prefill included, per prompt the median of the repeats, "
    "the ways of decoding taking turns; the speed-up is against the faster of the two ways without drafts"
)


@dataclass(frozen=True)
class Mismatch:
    """Greedy output that differs from transformers' generate.

    Attributes:
        prompt: number of the prompt.
        position: first new token that differs.
        tokens: ours and that of transformers; None where the output has ended.
        top2_gap: between the two largest logits of the target there.
    """

    prompt: int
    position: int
    tokens: tuple[int | None, int | None]
    top2_gap: float


@dataclass(frozen=True)
class PromptRecord:
    """One prompt. `seconds` by way of decoding; `new_tokens`, `emitted` (after prefill) and `forwards` are those with
    drafts."""

    name: str
    category: str
    prompt_tokens: int
    new_tokens: int
    forwards: int
    acceptance_length: float | None
    seconds: dict[str, float]
    emitted: int = 0
    turn: int = 1


@dataclass(frozen=True)
class Report:
    """The figures, what they were measured with and what they mean.

    Attributes:
        name: of the set of prompts.
        settings: target, draft, tree, sampling, hardware, versions.
        acceptance: over all prompts.
        by_category: acceptance length per category, where the prompts have several.
        groups: by `task` (the category), `turn` and `context` (tokens before the root), the latter two where there are
            several; each with its interval.
        tokens_per_s: by way of decoding.
        speedup: against `baseline`, the faster way without drafts; None if none was run.
        num_identical: prompts whose greedy output equals that of transformers; None if not compared.
        mismatches: the others.
        prompts: each of them.
    """

    name: str
    settings: dict[str, Any]
    acceptance: AcceptanceSummary
    by_category: dict[str, float]
    tokens_per_s: dict[str, float]
    prompts: list[PromptRecord]
    speedup: float | None = None
    baseline: str | None = None
    num_identical: int | None = None
    mismatches: list[Mismatch] = field(default_factory=list)
    groups: dict[str, dict[str, GroupSummary]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "definitions": {**DEFINITIONS, "tokens_per_s": _SPEED}}

    def rows(self) -> list[tuple[str, str]]:
        """The figures that matter, as label and text."""
        a = self.acceptance
        rows = [
            ("prompts", str(a.num_prompts)),
            ("acceptance length", _with_interval(a.acceptance_length, a.acceptance_length_interval)),
            (
                "acceptance length per prompt",
                _with_interval(a.acceptance_length_per_prompt, a.acceptance_length_per_prompt_interval),
            ),
            ("tokens / target forwards", f"{a.num_emitted} / {a.num_forwards}"),
            ("alpha by depth", " ".join(f"{x:.2f}" for x in a.alpha) or "none"),
            ("survival by depth", " ".join(f"{x:.2f}" for x in a.survival) or "none"),
            *(
                (f"acceptance length, {kind} {name}", _with_interval(group.acceptance_length, group.interval))
                for kind, groups in self.groups.items()
                for name, group in groups.items()
            ),
            *((f"tokens/s, {way}", f"{speed:.1f}") for way, speed in self.tokens_per_s.items()),
        ]
        if self.speedup is not None:
            rows.append((f"speed-up against {self.baseline}", f"{self.speedup:.2f}x"))
        if self.num_identical is not None:
            rows.append(("identical to transformers generate", f"{self.num_identical} of {len(self.prompts)}"))
        return rows + [("FAULT", fault) for fault in a.faults]

    def to_markdown(self) -> str:
        lines = [f"# Evaluation on {self.name}", "", "| | |", "|---|---|"]
        lines += [f"| {label} | {text} |" for label, text in self.rows()]
        if self.mismatches:
            lines += ["", "## Outputs that differ from transformers generate", ""]
            lines += ["| prompt | position | ours | transformers | top-2 gap of the logits |", "|---|---|---|---|---|"]
            lines += [
                f"| {self.prompts[m.prompt].name} | {m.position} | {m.tokens[0]} | {m.tokens[1]} | {m.top2_gap:.2e} |"
                for m in self.mismatches
            ]
        lines += ["", "## Settings", ""] + [f"- {key}: {value}" for key, value in self.settings.items()]
        lines += ["", "## Definitions", ""]
        lines += [f"- {key}: {text}" for key, text in self.to_dict()["definitions"].items()]
        return "\n".join(lines) + "\n"

    def table(self) -> Table:
        """The figures for the terminal."""
        settings = self.settings
        caption = (
            f"{settings['tree']}, temperature {settings['temperature']:g}, {settings['dtype']}, {settings['device']}"
        )
        table = Table(title=f"{self.name}: {settings['target']}", caption=caption, show_header=False)
        for label, text in self.rows():
            table.add_row(label, text, style="bold red" if label == "FAULT" else None)
        return table

    def save(self, folder: str | Path) -> Path:
        """Writes `<name>.json` and `<name>.md` into `folder`; returns the former."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.to_markdown(), encoding="utf-8")
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return path


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"
