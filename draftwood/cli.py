"""The command line. Every command parses, calls one function and prints; what it needs is imported when it runs."""

import json
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

benchmark = typer.Typer(no_args_is_help=True, help="What things cost on this machine.")
app.add_typer(benchmark, name="benchmark")

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


@benchmark.command("verify")
def benchmark_verify(
    shape: Annotated[str, typer.Option(help="smollm2, mambainllama-8b, nemotron-h-8b or tiny.")] = "smollm2",
    nodes: Annotated[str, typer.Option(help="Tree sizes.")] = "1,5,13,32,64",
    dtypes: Annotated[str, typer.Option(help="Of the model.")] = "float32,bfloat16",
    context: Annotated[int, typer.Option(help="Tokens before the step.")] = 256,
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 15,
    graph: Annotated[bool, typer.Option(help="Chain and tree with fixed shapes, as CUDA graphs on a GPU.")] = False,
    device: DeviceOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot here.")] = None,
) -> None:
    """Time a tree step against an autoregressive one and the ways others verify, in one run."""
    import torch
    from rich.console import Console

    from draftwood.decode.benchmark import SHAPES, benchmark_verify

    if shape not in SHAPES:
        raise ValueError(f"--shape {shape}: expected one of {', '.join(SHAPES)}")
    with Console(stderr=True).status("") as status:
        result = benchmark_verify(
            SHAPES[shape],
            nodes=tuple(int(n) for n in nodes.split(",")),
            dtypes=tuple(getattr(torch, name) for name in dtypes.split(",")),
            context=context,
            repeats=repeats,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            graph=graph,
            on_progress=status.update,
        )
    Console().print(result.table())
    if json_file is not None:
        result.save(json_file)
    if plot is not None:
        result.plot(plot)


@benchmark.command("distill")
def benchmark_distill(
    shape: Annotated[str, typer.Option(help="smollm2 or tiny.")] = "smollm2",
    align: Annotated[str, typer.Option(help="Numbers of align steps, 1 among them.")] = "1,2,3,4,5",
    sources: Annotated[
        str, typer.Option(help="none: features given; cached: read and collated; online: by a target forward.")
    ] = "none,cached,online",
    dtype: Annotated[str, typer.Option(help="bf16 (autocast) or float32.")] = "bf16",
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 2,
    length: Annotated[int, typer.Option(help="Rows of the draft in each, all supervised.")] = 512,
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 5,
    device: DeviceOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time a training step as align steps are added, with and without getting the features, in one run."""
    import torch
    from rich.console import Console

    from draftwood.train.benchmark import PRECISIONS, SHAPES, benchmark_distill

    if shape not in SHAPES:
        raise ValueError(f"--shape {shape}: expected one of {', '.join(SHAPES)}")
    if dtype not in PRECISIONS:
        raise ValueError(f"--dtype {dtype}: expected one of {', '.join(PRECISIONS)}")
    with Console(stderr=True).status("") as status:
        result = benchmark_distill(
            SHAPES[shape],
            align=tuple(int(n) for n in align.split(",")),
            sources=tuple(sources.split(",")),
            precision=PRECISIONS[dtype],
            batch_size=batch,
            length=length,
            repeats=repeats,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            on_progress=status.update,
        )
    Console().print(result.table())
    if json_file is not None:
        result.save(json_file)


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
