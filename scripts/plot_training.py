"""Plots the acceptance length of a draft over its training, from the decodes that `loop.decode_every` asked for.

    python scripts/plot_training.py runs/first/metrics.jsonl --then runs/second/metrics.jsonl --out plot.png

A run that goes on from another one's draft stands to its right.
"""

import json
from pathlib import Path
from typing import Annotated

import matplotlib
import typer

matplotlib.use("Agg")
from matplotlib import pyplot


def main(
    metrics: Annotated[Path, typer.Argument(help="metrics.jsonl of a run.")],
    out: Annotated[Path, typer.Option(help="Image to write.")],
    then: Annotated[list[Path] | None, typer.Option(help="metrics.jsonl of a run that went on from its draft.")] = None,
) -> None:
    figure, axis = pyplot.subplots(figsize=(7, 4))
    before = 0
    for number, path in enumerate([metrics, *(then or [])], 1):
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            decoded = [row for row in rows if row["kind"] == "decode"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise typer.BadParameter(f"{path}: not the metrics.jsonl of a run ({error!r})") from None
        estimated = [row for row in rows if row["kind"] == "validation"]
        if not decoded:
            raise typer.BadParameter(f"{path} has no decodes; set loop.decode_every in the run")
        steps, means = [before + row["step"] for row in decoded], [row["acceptance_length"] for row in decoded]
        low, high = zip(*(row["acceptance_length_interval"] for row in decoded), strict=True)
        name = f"run {number}: " if then else ""
        what = f"{name}decoded, {decoded[0]['tree']}, {decoded[0]['num_prompts']} prompts"
        (line,) = axis.plot(steps, means, marker="o", label=what)
        axis.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
        axis.plot(
            [before + row["step"] for row in estimated],
            [row["acceptance_length"] for row in estimated],
            marker="s",
            linestyle="--",
            color=line.get_color(),
            label=f"{name}estimated for a chain, validation rows",
        )
        before += max(row["step"] for row in rows)
    axis.set(xlabel="optimizer steps", ylabel="acceptance length")
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
