"""Commands that decode, or look at what decodes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwood.cli_options import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    NewTokensOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    TreeOption,
    load_models,
    prompt_set_of,
    tree_of,
)

app = typer.Typer()

ColourOption = Annotated[
    bool, typer.Option("--colour-drafts", help="Accepted drafts in colour, the target's own tokens plain.")
]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads it from the standard input.")],
    target: TargetOption = "smollm2-135m",
    draft: DraftOption = None,
    tree: TreeOption = "dynamic",
    max_new_tokens: NewTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    colour_drafts: ColourOption = False,
) -> None:
    """Answer a prompt: the text on the standard output as it comes, what it took on the standard error."""
    from draftwood.decode.console import answer, read_utf8

    text = read_utf8(sys.stdin.buffer.read()) if prompt == "-" else prompt

    models = load_models(target, draft, tree, dtype, device, temperature)
    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    colour = _coloured() if colour_drafts else None
    _, summary = answer(*models, text, _write, colour, tree=tree_of(tree, draft, models[0]), **settings)
    typer.echo()
    typer.echo(summary, err=True)


@app.command()
def chat(
    target: TargetOption = "smollm2-135m",
    draft: DraftOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    tree: TreeOption = "dynamic",
    max_new_tokens: NewTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    colour_drafts: ColourOption = False,
) -> None:
    """Talk with a target: /reset forgets the turns, Ctrl-C stops an answer, /exit or Ctrl-D ends; or a turn a line."""
    from draftwood.decode.chat import chat as run

    models = load_models(target, draft, tree, dtype, device, temperature)
    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    settings["tree"] = tree_of(tree, draft, models[0])
    colour = _coloured() if colour_drafts else None
    run(
        *models,
        _read_turn,
        _write,
        lambda line: typer.echo(line, err=True),
        system=system,
        write_draft=colour,
        **settings,
    )


@app.command()
def evaluate(
    prompts: Annotated[
        list[str],
        typer.Option(help="JSON Lines with `turns`, or validation:<prepared folder>; repeat it for a report each."),
    ],
    draft: Annotated[Path, typer.Option(help="Folder of a draft, or model:<language model>.")],
    target: TargetOption = "smollm2-135m",
    out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("runs/evaluate"),
    tree: TreeOption = "dynamic",
    max_new_tokens: NewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    num_prompts: Annotated[int | None, typer.Option(help="Prompts of each source, from its start.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Leave out longer prompts.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each way of decoding.")] = 1,
    baseline: Annotated[bool, typer.Option(help="Also run and time decoding without drafts.")] = True,
    seed: Annotated[int, typer.Option(help="Of sampling and intervals.")] = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Measure acceptance length, speed and losslessness of a draft: a report for each set of prompts."""
    from rich.console import Console

    from draftwood.decode.evaluate import evaluate as run

    models = load_models(target, draft, tree, dtype, device, temperature)
    sets = [prompt_set_of(source, models[0].tokenizer, num_prompts, max_prompt_tokens) for source in prompts]
    if len({s.name for s in sets}) < len(sets):
        raise ValueError(f"--prompts: two of {', '.join(s.name for s in sets)} have one name, and so one report")
    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    spec = tree_of(tree, draft, models[0])
    for prompt_set in sets:
        name = prompt_set.name
        with Console(stderr=True).status(f"{name}: {len(prompt_set.prompts)} prompts") as status:

            def show(done: int, total: int, name: str = name, status: Any = status) -> None:
                status.update(f"{name}: {done} of {total}")

            report = run(*models, prompt_set, tree=spec, baseline=baseline, repeats=repeats, on_prompt=show, **settings)
        Console().print(report.table())
        typer.echo(f"{report.save(out)}", err=True)


@app.command()
def doctor(
    target: Annotated[str, typer.Argument(metavar="MODEL", help="Built-in name, folder or hub id.")],
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the diagnosis here.")] = None,
) -> None:
    """Say what a target is and whether it can be relied on, in seconds; exit code 1 if not."""
    from rich.console import Console

    from draftwood.models.doctor import diagnose
    from draftwood.models.target import open_target

    diagnosis = diagnose(open_target(target, dtype, device))
    if json_file is not None:
        json_file.write_text(json.dumps(diagnosis.to_dict(), indent=2) + "\n", encoding="utf-8")
    Console().print(diagnosis.table())
    raise typer.Exit(0 if diagnosis.is_healthy else 1)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _coloured() -> Callable[[str], None]:
    """Writes in colour; plainly where NO_COLOR is set or there is no terminal."""
    from rich.console import Console

    console = Console()
    if console.no_color or console.color_system is None:
        return _write
    return lambda text: console.out(text, style="green", end="", highlight=False)


def _read_turn() -> str:
    from draftwood.decode.console import read_utf8

    if sys.stdin.isatty():
        return input("> ")
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return read_utf8(line, "a line of the standard input")
