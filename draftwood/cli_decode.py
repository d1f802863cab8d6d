"""Commands that decode, or look at what decodes."""

import json
import sys
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
    check_prompts,
    check_sampling,
    check_tree,
    load_models,
    prompt_set_of,
    tree_of,
)

app = typer.Typer()

StopOption = Annotated[
    list[str] | None, typer.Option("--stop", help="A text that ends the answer; repeat it for several.")
]
ColourOption = Annotated[
    bool, typer.Option("--colour-drafts", help="Accepted drafts in colour, the target's own tokens plain.")
]


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; '-' reads it from the standard input.")] = None,
    target: TargetOption = "smollm2-hybrid",
    draft: DraftOption = None,
    tree: TreeOption = "dynamic",
    max_new_tokens: NewTokensOption = 256,
    stop: StopOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    colour_drafts: ColourOption = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Answer those of a file: .jsonl or .json with `turns`, .txt with one a line.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON Lines file of --prompts; one begun is gone on with.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Of --prompts: so many answered together.")] = 1,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Of --prompts: so many from the start.")] = None,
) -> None:
    """Answer a prompt on the standard output, what it took on the standard error; or --prompts into --out."""
    if (prompt is None) == (prompts is None) or (prompts is None) != (out is None):
        raise ValueError("generate takes a prompt, or a file of them with --prompts and one for the answers with --out")
    settings = _settings(max_new_tokens, temperature, top_k, top_p, stop)
    if prompts is not None and out is not None:
        from draftwood.decode.answer_prompts import answer_prompts

        check_prompts([prompts], num_prompts)
        models = load_models(target, draft, tree, dtype, device, temperature)
        settings |= {"tree": tree_of(tree, draft, models[0]), "seed": seed or 0}
        account = answer_prompts(*models, prompts, out, batch_size=batch_size, num_prompts=num_prompts, **settings)
        typer.echo(account.summary(), err=True)
        if not account.is_finished:
            typer.echo(f"stopped; the same command goes on with {out}", err=True)
        raise typer.Exit(0 if account.is_finished else 130)
    from draftwood.decode.console import answer
    from draftwood.decode.screen import open_screen
    from draftwood.decode.text import read_utf8

    text = read_utf8(sys.stdin.buffer.read()) if prompt == "-" else prompt or ""
    models = load_models(target, draft, tree, dtype, device, temperature)
    settings |= {"tree": tree_of(tree, draft, models[0]), "seed": seed}
    screen = open_screen(colour_drafts)
    reply = answer(*models, text, screen, **settings)
    screen.end()
    typer.echo(reply.summary, err=True)
    raise typer.Exit(130 if reply.is_interrupted else 0)


@app.command()
def chat(
    target: TargetOption = "smollm2-hybrid",
    draft: DraftOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    tree: TreeOption = "dynamic",
    max_new_tokens: NewTokensOption = 512,
    stop: StopOption = None,
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
    from draftwood.decode.screen import open_screen

    settings = _settings(max_new_tokens, temperature, top_k, top_p, stop)
    models = load_models(target, draft, tree, dtype, device, temperature)
    settings |= {"tree": tree_of(tree, draft, models[0]), "seed": seed, "system": system}
    run(*models, _read_turn, open_screen(colour_drafts), lambda line: typer.echo(line, err=True), **settings)


@app.command()
def evaluate(
    prompts: Annotated[
        list[str],
        typer.Option(help="File as of generate, or validation:<prepared folder>; repeat it for a report each."),
    ],
    draft: Annotated[Path, typer.Option(help="Folder of a draft, or model:<language model>.")],
    target: TargetOption = "smollm2-hybrid",
    out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("runs/evaluate"),
    trees: Annotated[
        list[str] | None,
        typer.Option("--tree", help="As of generate; repeat it to compare trees with the first.  [default: dynamic]"),
    ] = None,
    max_new_tokens: NewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    num_prompts: Annotated[int | None, typer.Option(help="Prompts of each source, from its start.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Leave out longer prompts.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each way of decoding.")] = 1,
    baseline: Annotated[bool, typer.Option(help="Also run and time decoding without drafts.")] = True,
    seed: Annotated[int, typer.Option(help="Of sampling and intervals.")] = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Measure acceptance length, speed and losslessness of a draft: a report for each set of prompts."""
    from rich.console import Console

    from draftwood.decode.compare import compare_trees

    trees = trees or ["dynamic"]
    if len(set(trees)) < len(trees):
        raise ValueError(f"--tree: got {', '.join(trees)}; expected different ones")
    for tree in trees:
        check_tree(tree, temperature)
    check_sampling(temperature, top_k, top_p)
    check_prompts(prompts, num_prompts)
    models = load_models(target, draft, trees[0], dtype, device, temperature)
    sets = [prompt_set_of(source, models[0].tokenizer, num_prompts, max_prompt_tokens) for source in prompts]
    if len({s.name for s in sets}) < len(sets):
        raise ValueError(f"--prompts: two of {', '.join(s.name for s in sets)} have one name, and so one report")
    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    named = {tree: tree_of(tree, draft, models[0]) for tree in trees}
    for prompt_set in sets:
        name = prompt_set.name
        with Console(stderr=True).status(f"{name}: {len(prompt_set.prompts)} prompts") as status:

            def show(done: int, total: int, name: str = name, status: Any = status) -> None:
                status.update(f"{name}: {done} of {total}")

            comparison = compare_trees(
                *models, named, prompt_set, baseline=baseline, repeats=repeats, on_prompt=show, **settings
            )
        alone = comparison.reports[trees[0]] if len(trees) == 1 else None
        Console().print((alone or comparison).table())
        typer.echo(f"{alone.save(out) if alone else comparison.save(out, name)}", err=True)


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


def _settings(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, stop: list[str] | None
) -> dict[str, Any]:
    """Of `generate`, checked."""
    check_sampling(temperature, top_k, top_p)
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    return dict(max_new_tokens=max_new_tokens, stop_strings=stop or [], **sampling)


def _read_turn() -> str:
    from draftwood.decode.text import read_utf8

    while sys.stdin.isatty():
        try:
            return read_utf8(input("> ").encode("utf-8", "surrogateescape"), "the line")
        except ValueError as error:
            typer.echo(f"{error}; it is left out", err=True)
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return read_utf8(line, "a line of the standard input")
