"""Commands that prepare data and train."""

import os
from pathlib import Path
from typing import Annotated

import typer

from draftwood.cli_options import (
    DeviceOption,
    DtypeOption,
    NewTokensOption,
    TemperatureOption,
    TopPOption,
    TreeOption,
    check_sampling,
    load_models,
    tree_of,
)

app = typer.Typer()


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="Folder for the prepared rows.")],
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="`sharegpt`, a file, a folder saved by datasets or a hub id; path:0.3 uses 30 %, path:2 all twice, "
            "path#split of a data set. May be given several times. Default: sharegpt."
        ),
    ] = None,
    target: Annotated[str, typer.Option(help="Whose tokenizer and template.")] = "smollm2-hybrid",
    max_length: Annotated[int, typer.Option(help="Tokens of a row at most.")] = 2048,
    long_rows: Annotated[str, typer.Option(help="Rows above that: clip or drop.")] = "clip",
    min_length: Annotated[int, typer.Option(min=0, help="Drop rows of fewer tokens.")] = 0,
    num_validation: Annotated[int, typer.Option(min=0, help="Rows held out.")] = 200,
    limit: Annotated[int | None, typer.Option(help="Conversations to read of each source; default: all.")] = None,
    system: Annotated[str, typer.Option(help="System turns: keep, fold or drop.")] = "keep",
    num_proc: Annotated[int, typer.Option(help="Processes.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the split, and of the choice by weight.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace rows prepared with other settings.")] = False,
) -> None:
    """Turn conversations into training rows, every row accounted for."""
    from rich.console import Console

    from draftwood.models.target import load_tokenizer
    from draftwood.train.prepare import prepare as run
    from draftwood.train.turns import TurnPolicy

    account = run(
        source or "sharegpt",
        load_tokenizer(target),
        out,
        max_length=max_length,
        min_length=min_length,
        long_rows=long_rows,  # type: ignore[arg-type]
        num_validation=num_validation,
        seed=seed,
        policy=TurnPolicy(system=system),  # type: ignore[arg-type]
        limit=limit,
        num_proc=num_proc,
        overwrite=overwrite,
    )
    Console().print(account)
    Console(stderr=True).print(f"{out / 'report.html'} shows the same and some rows", highlight=False, soft_wrap=True)


@app.command()
def regenerate(
    target: Annotated[str, typer.Argument(help="Whose answers: built-in name, folder or hub id.")],
    source: Annotated[list[str], typer.Argument(help="Whose questions: as --source of `prepare`.")],
    out: Annotated[Path, typer.Option(help="JSON Lines file; one that was begun is gone on with.")],
    draft: Annotated[Path | None, typer.Option(help="A draft checkpoint, to be faster.")] = None,
    tree: TreeOption = "dynamic",
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    max_new_tokens: NewTokensOption = 512,
    max_length: Annotated[int, typer.Option(help="Tokens of a conversation at most.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Conversations answered together.")] = 8,
    limit: Annotated[int | None, typer.Option(help="Conversations to read of each source; default: all.")] = None,
    system: Annotated[str, typer.Option(help="System turns: keep, fold or drop.")] = "keep",
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Let the target answer the prompts of conversations itself, turn by turn: data of its own to distil from."""
    from rich.console import Console

    from draftwood.train.regenerate import regenerate as run
    from draftwood.train.turns import TurnPolicy

    check_sampling(temperature, top_p=top_p)
    loaded, loaded_draft = load_models(target, draft, tree, dtype, device, temperature)
    found = run(
        loaded,
        source,
        out,
        draft=loaded_draft,
        tree=tree_of(tree, draft, loaded) if draft is not None else None,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        batch_size=batch_size,
        limit=limit,
        seed=seed,
        policy=TurnPolicy(system=system),  # type: ignore[arg-type]
    )
    Console().print(found)
    if not found.is_finished:
        typer.echo(f"stopped; the same command goes on with {out}", err=True)
        raise typer.Exit(130)


@app.command()
def distill(
    config: Annotated[str, typer.Argument(help="A shipped recipe's name or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; train and write nothing.")] = False,
) -> None:
    """Train a draft in this process; `accelerate launch -m draftwood.train` does it in several."""
    from draftwood.train.launch import main as launch

    launch(["--config", config, *(overrides or []), *(["--dry-run"] if dry_run else [])])


@app.command()
def hybridize(
    target: Annotated[str, typer.Argument(help="Llama-style model: built-in name, folder or hub id.")],
    layers: Annotated[str, typer.Option(help="Attention layers to replace: 1,3,5 or auto:<how many>.")],
    out: Annotated[Path, typer.Option(help="Folder for the hybrid; a run that was stopped there goes on.")],
    source: Annotated[str, typer.Option(help="`sharegpt`, or a file of conversations.")] = "sharegpt",
    fit_tokens: Annotated[int, typer.Option(help="Of each mixer's fit to its attention layer.")] = 400_000,
    select_tokens: Annotated[int, typer.Option(help="Of the fit, before auto chooses.")] = 120_000,
    distil_tokens: Annotated[int, typer.Option(help="Of the whole hybrid's distillation.")] = 1_200_000,
    length: Annotated[int, typer.Option(help="Tokens of a block.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Blocks of a step, all processes together.")] = 4,
    lr: Annotated[float, typer.Option(help="Of the fit.")] = 1e-3,
    distil_lr: Annotated[float, typer.Option(help="Of the distillation.")] = 5e-4,
    mixer_weight: Annotated[float, typer.Option(help="Of the mixers' errors beside the KL in the distillation.")] = 1.0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the order of the data and the new weights.")] = 0,
    compile: Annotated[bool, typer.Option(help="Distil through torch.compile: faster, needs a C++ compiler.")] = False,
    tracker: Annotated[str, typer.Option(help="none, wandb or tensorboard.")] = "none",
    num_validation: Annotated[
        int | None, typer.Option(help="Conversations held out; default: a tenth, 200 at most.")
    ] = None,
    data_folder: Annotated[Path | None, typer.Option(help="Prepared rows; default: in the cache folder.")] = None,
) -> None:
    """Replace attention layers by Mamba-2 mixers and distil: a plain Bamba model that transformers loads."""
    from rich.console import Console

    from draftwood.train.hybridize import HybridizeConfig, chosen_layers
    from draftwood.train.hybridize import hybridize as run
    from draftwood.train.loop import Stopped

    numbers, num_auto = chosen_layers(layers)
    config = HybridizeConfig(
        numbers, num_auto, fit_tokens, select_tokens, distil_tokens, length, batch_size, lr, distil_lr, mixer_weight,
        save_every=save_every, seed=seed, compile=compile,
    )  # fmt: skip
    console = Console(stderr=True)
    try:
        found = run(
            target, source, out, config, data_folder=data_folder, num_validation=num_validation, tracker=tracker,
            console=console,
        )  # fmt: skip
    except Stopped as stop:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(str(stop), err=True)
        raise typer.Exit(130) from None
    if found is not None:
        console.print(f"{out}: KL {found.kl:.3f} nats, top-1 agreement {found.top1:.1%} on held-out text")
