"""The command line. Every command parses, calls one function and prints; what it needs is imported when it runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from draftwood.decode.prompts import PromptSet

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train draft models for hybrid LLMs and decode with them, losslessly.",
)

TargetOption = Annotated[str, typer.Option("--target", help="Built-in name, folder or hub id of the target.")]
TreeOption = Annotated[
    str, typer.Option("--tree", help="chain-<k>, stree, eagle-25, dynamic or dynamic-<draft nodes>.")
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16; default: as saved.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Default: the first GPU, else the CPU.")]
NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", help="Bound on the new tokens of an answer.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0: greedy.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Keep so many tokens of the target's distribution.")]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens of this total share.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads it from the standard input.")],
    target: TargetOption = "smollm2-135m",
    draft: Annotated[Path | None, typer.Option(help="Folder of a draft; without it, no drafts.")] = None,
    tree: TreeOption = "dynamic",
    max_new_tokens: NewTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Answer a prompt: the text on the standard output as it comes, what it took on the standard error."""
    from draftwood.decode.console import answer

    models = _load(target, draft, tree, dtype, device)
    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    _, summary = answer(*models, text, _write, tree=tree, **settings)
    typer.echo()
    typer.echo(summary, err=True)


@app.command()
def evaluate(
    prompts: Annotated[
        list[str],
        typer.Option(help="JSON Lines with `turns`, or validation:<prepared folder>; repeat it for a report each."),
    ],
    draft: Annotated[Path, typer.Option(help="Folder of a draft.")],
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

    models = _load(target, draft, tree, dtype, device)
    sets = [_prompt_set(source, models[0].tokenizer, num_prompts, max_prompt_tokens) for source in prompts]
    if len({s.name for s in sets}) < len(sets):
        raise ValueError(f"--prompts: two of {', '.join(s.name for s in sets)} have one name, and so one report")
    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    for prompt_set in sets:
        name = prompt_set.name
        with Console(stderr=True).status(f"{name}: {len(prompt_set.prompts)} prompts") as status:

            def show(done: int, total: int, name: str = name, status: Any = status) -> None:
                status.update(f"{name}: {done} of {total}")

            report = run(*models, prompt_set, tree=tree, baseline=baseline, repeats=repeats, on_prompt=show, **settings)
        Console().print(report.table())
        typer.echo(f"{report.save(out)}", err=True)


def _load(target: str, draft: Path | None, tree: str, dtype: str | None, device: str | None) -> tuple[Any, Any]:
    """Target and draft; the tree's name is checked first, because loading takes longer."""
    from draftwood.decode.propose import resolve_tree
    from draftwood.models.target import load_target

    resolve_tree(tree)
    loaded = load_target(target, dtype, device)
    if draft is None:
        return loaded, None
    from draftwood.models.checkpoint import load_draft

    return loaded, load_draft(draft, loaded)


def _prompt_set(source: str, tokenizer: Any, limit: int | None, max_tokens: int | None) -> "PromptSet":
    from draftwood.decode.prompts import prompts_from_rows, read_prompts

    kind, colon, folder = source.partition(":")
    if kind == "validation" and colon:
        from draftwood.train.prepare import load_rows

        return prompts_from_rows(load_rows(folder, "validation"), "validation", limit=limit, max_tokens=max_tokens)
    return read_prompts(source, tokenizer, limit=limit, max_tokens=max_tokens)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    """Runs the command line. A mistake of the caller is one line on the standard error and exit code 2."""
    try:
        app()
    except Exception as error:
        from draftwood.models.assets import AssetError

        if not isinstance(error, ValueError | OSError | AssetError):
            raise
        typer.echo(f"draftwood: {error}", err=True)
        raise SystemExit(2) from None
