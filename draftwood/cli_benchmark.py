"""`draftwood benchmark ...`: what things cost on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from draftwood.cli_options import (
    DeviceOption,
    NewTokensOption,
    TargetOption,
    check_draft,
    check_prompts,
    load_any_draft,
    prompt_set_of,
)

app = typer.Typer(no_args_is_help=True, help="What things cost on this machine.")
DTYPES = ("float32", "bfloat16", "float16")
DtypesOption = Annotated[str, typer.Option("--dtypes", help="Of the model, with commas: float32, bfloat16, float16.")]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Timed rounds; medians are reported.")]


def _dtypes(text: str) -> dict[str, Any]:
    """The dtypes named in `--dtypes`, by name."""
    import torch

    names = text.split(",")
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"--dtypes {text}: no dtype '{name}'; expected {', '.join(DTYPES)}, with commas between")
    return {name: getattr(torch, name) for name in names}


def _numbers(option: str, text: str, kind: type = int) -> list[Any]:
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        which = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} {text}: expected {which} with commas between them, as in 1,2") from None


@app.command("decode")
def benchmark_decode(
    target: TargetOption,
    prompts: Annotated[list[str], typer.Option(help="As of evaluate; repeat it for several sets.")],
    draft: Annotated[Path | None, typer.Option(help="Folder or name of a draft, or model:<a model's>.")] = None,
    temperatures: Annotated[str, typer.Option(help="With commas.")] = "0,1",
    strategies: Annotated[
        str | None, typer.Option(help="With commas: autoregressive, plan, any tree; default: all that apply.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Prompts from the start of each set.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Leave out longer prompts.")] = None,
    max_new_tokens: NewTokensOption = 128,
    dtypes: DtypesOption = "float32",
    strategy_dtypes: Annotated[
        str | None, typer.Option(help="Of --dtypes those to draft in; default: all. Without drafts all are measured.")
    ] = None,
    repeats: RepeatsOption = 1,
    seed: Annotated[int, typer.Option(help="Of sampling and intervals.")] = 0,
    device: DeviceOption = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures here; a run stopped half-way goes on from beside it."),
    ] = None,
) -> None:
    """Measure every strategy in turn on the same prompts, against the fastest decoding without drafts."""
    from rich.console import Console

    from draftwood.decode import benchmark_strategies as run
    from draftwood.decode.certificate import hash_tensors
    from draftwood.decode.propose.plan import plans_of
    from draftwood.models.target import load_target

    names, wanted = _dtypes(dtypes), None if strategies is None else strategies.split(",")
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, repeats=repeats)
    options["temperatures"] = _numbers("--temperatures", temperatures, float)
    plans = {} if draft is None else plans_of(draft, tuple(names))
    if wanted is not None:  # before anything is loaded
        run.check_settings(wanted, has_draft=draft is not None, has_plan=bool(plans), **options)
    check_prompts(prompts, num_prompts)
    if draft is not None:
        check_draft(draft, target)
    with Console(stderr=True).status("loading") as status:
        models: dict[str, tuple[Any, Any]] = {}
        for name in names:
            loaded = load_target(target, name, device)
            models[name] = loaded, None if draft is None else load_any_draft(draft, loaded)
        first, own = next(iter(models.values()))
        sets = [prompt_set_of(source, first.tokenizer, num_prompts, max_prompt_tokens) for source in prompts]
        result = run.benchmark_decode(
            models,
            sets,
            strategies=wanted,
            strategy_dtypes=None if strategy_dtypes is None else strategy_dtypes.split(","),
            plans=plans,
            seed=seed,
            journals=None if json_file is None else json_file.with_suffix(".journals"),
            identity="" if own is None else hash_tensors(dict(own.state_dict())),
            on_progress=status.update,
            **options,
        )
    for table in result.tables:
        Console().print(table.table())
    if json_file is not None:
        result.save(json_file)


@app.command("verify")
def benchmark_verify(
    shape: Annotated[str, typer.Option(help="smollm2, mambainllama-8b, nemotron-h-8b or tiny.")] = "smollm2",
    nodes: Annotated[str, typer.Option(help="Tree sizes.")] = "1,5,13,32,64",
    dtypes: DtypesOption = "float32,bfloat16",
    context: Annotated[int, typer.Option(help="Tokens before the step.")] = 256,
    repeats: RepeatsOption = 15,
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
            nodes=tuple(_numbers("--nodes", nodes)),
            dtypes=tuple(_dtypes(dtypes).values()),
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


@app.command("distill")
def benchmark_distill(
    shape: Annotated[str, typer.Option(help="smollm2 or tiny.")] = "smollm2",
    align: Annotated[str, typer.Option(help="Numbers of align steps, 1 among them.")] = "1,2,3,4,5",
    sources: Annotated[
        str, typer.Option(help="none: features given; cached: read and collated; online: by a target forward.")
    ] = "none,cached,online",
    dtype: Annotated[str, typer.Option(help="bf16 (autocast) or float32.")] = "bf16",
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 2,
    length: Annotated[int, typer.Option(help="Rows of the draft in each, all supervised.")] = 512,
    repeats: RepeatsOption = 5,
    compile: Annotated[bool, typer.Option(help="As loop.compile: through torch.compile.")] = False,
    device: DeviceOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time a training step as align steps are added, with and without getting the features, in one run."""
    import torch
    from rich.console import Console

    from draftwood.train.benchmark import PRECISIONS, SHAPES, benchmark_distill

    if shape not in SHAPES:
        raise ValueError(f"--shape {shape}: expected one of {', '.join(SHAPES)}")
    numbers = tuple(_numbers("--align", align))
    if dtype not in PRECISIONS:
        raise ValueError(f"--dtype {dtype}: expected one of {', '.join(PRECISIONS)}")
    with Console(stderr=True).status("") as status:
        result = benchmark_distill(
            SHAPES[shape],
            align=numbers,
            sources=tuple(sources.split(",")),
            precision=PRECISIONS[dtype],
            batch_size=batch,
            length=length,
            repeats=repeats,
            compiled=compile,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            on_progress=status.update,
        )
    Console().print(result.table())
    if json_file is not None:
        result.save(json_file)
