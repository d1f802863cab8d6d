"""`draftwood benchmark ...`: what things cost on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from draftwood.cli_options import (
    DeviceOption,
)

app = typer.Typer(no_args_is_help=True, help="What things cost on this machine.")


@app.command("verify")
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
    try:
        numbers = tuple(int(n) for n in align.split(","))
    except ValueError:
        raise ValueError(f"--align {align}: expected whole numbers with commas between them, as in 1,2,3") from None
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
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            on_progress=status.update,
        )
    Console().print(result.table())
    if json_file is not None:
        result.save(json_file)
