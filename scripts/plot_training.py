"""Plots the acceptance length of a draft over its training, from the decodes that `loop.decode_every` asked for.

python scripts/plot_training.py runs/smollm2-hybrid-hass/metrics.jsonl docs/draft_training.png
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
    out: Annotated[Path, typer.Argument(help="Image to write.")],
) -> None:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    decoded = [row for row in rows if row["kind"] == "decode"]
    if not decoded:
        raise typer.BadParameter(f"{metrics} has no decodes; set loop.decode_every in the run")
    steps, means = [row["step"] for row in decoded], [row["acceptance_length"] for row in decoded]
    low, high = zip(*(row["acceptance_length_interval"] for row in decoded), strict=True)
    estimated = [row for row in rows if row["kind"] == "validation"]

    figure, axis = pyplot.subplots(figsize=(7, 4))
    axis.plot(steps, means, marker="o", label=f"decoded, {decoded[0]['tree']}, {decoded[0]['num_prompts']} prompts")
    axis.fill_between(steps, low, high, alpha=0.2)
    axis.plot(
        [row["step"] for row in estimated],
        [row["acceptance_length"] for row in estimated],
        marker="s",
        linestyle="--",
        label="estimated for a chain, validation rows",
    )
    axis.set(xlabel="optimizer steps", ylabel="acceptance length")
    axis.legend()
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    typer.run(main)
