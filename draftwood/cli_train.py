"""Commands that prepare data and train."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="Folder for the prepared rows.")],
    source: Annotated[str, typer.Option(help="`sharegpt`, or a file of conversations.")] = "sharegpt",
    target: Annotated[str, typer.Option(help="Whose tokenizer and template.")] = "smollm2-135m",
    max_length: Annotated[int, typer.Option(help="Tokens of a row; the rest is clipped.")] = 2048,
    num_validation: Annotated[int, typer.Option(help="Rows held out.")] = 200,
    limit: Annotated[int | None, typer.Option(help="Conversations to read; default: all.")] = None,
    system: Annotated[str, typer.Option(help="System turns: keep, fold or drop.")] = "keep",
    num_proc: Annotated[int, typer.Option(help="Processes.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the split.")] = 0,
) -> None:
    """Turn conversations into training rows, every row accounted for."""
    from rich.console import Console

    from draftwood.models.target import load_tokenizer
    from draftwood.train.prepare import prepare as run
    from draftwood.train.turns import TurnPolicy

    account = run(
        source,
        load_tokenizer(target),
        out,
        max_length=max_length,
        num_validation=num_validation,
        seed=seed,
        policy=TurnPolicy(system=system),  # type: ignore[arg-type]
        limit=limit,
        num_proc=num_proc,
    )
    Console().print(account)


@app.command()
def distill(
    config: Annotated[str, typer.Argument(help="A shipped recipe's name or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value")] = None,
) -> None:
    """Train a draft in this process; `accelerate launch -m draftwood.train` does it in several."""
    from draftwood.train.launch import main as launch

    launch(["--config", config, *(overrides or [])])
