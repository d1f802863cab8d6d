"""Commands that prove what a draft does, plan how to use it and compare it with others."""

from pathlib import Path
from typing import Annotated, Any

import typer

from draftwood.cli_options import (
    DeviceOption,
    DtypeOption,
    NewTokensOption,
    TemperatureOption,
    TreeOption,
    check_draft,
    check_prompts,
    check_sampling,
    load_any_draft,
    load_models,
    prompt_set_of,
)

app = typer.Typer()


@app.command()
def certify(
    target: Annotated[str, typer.Argument(help="Built-in name, folder or hub id of the target.")],
    draft: Annotated[Path, typer.Argument(help="Folder of a draft.")],
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines with `turns`; default: built-in prompts.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to take from the file.")] = 8,
    tree: Annotated[list[str] | None, typer.Option(help="Trees to check greedily; default: several.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Of a greedy output; default: 48, quickly 16.")] = None,
    rows: Annotated[int | None, typer.Option(help="Sampled continuations; default: 1024, quickly 128.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts, tokens, rows and cases.")] = False,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(help="Default: certificate.json beside the draft.")] = None,
) -> None:
    """Prove that decoding with a draft gives what the target gives alone; exit code 1 if it does not."""
    from rich.console import Console

    from draftwood.decode.certify import certify as run
    from draftwood.models.checkpoint import notes_folder

    check_prompts([prompts] if prompts else [], num_prompts)
    models = load_models(target, draft, "dynamic", dtype, device)
    ids: Any = None
    if prompts is not None:
        ids = [p.input_ids for p in prompt_set_of(str(prompts), models[0].tokenizer, num_prompts, None).prompts]
    with Console(stderr=True).status("") as status:
        certificate = run(
            *models,
            folder=draft,
            prompts=ids,
            trees=tree,
            max_new_tokens=max_new_tokens,
            rows=rows,
            quick=quick,
            seed=seed,
            on_progress=status.update,
        )
    Console().print(certificate.table())
    typer.echo(f"{certificate.save(out or notes_folder(draft) / 'certificate.json')}", err=True)
    raise typer.Exit(0 if certificate.passed else 1)


@app.command()
def plan(
    target: Annotated[str, typer.Argument(help="Built-in name, folder or hub id of the target.")],
    draft: Annotated[Path, typer.Argument(help="Folder of a draft.")],
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines with `turns`; default: built-in prompts.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to observe acceptance on.")] = 8,
    dtypes: Annotated[str | None, typer.Option("--dtype", help="One or more, by commas; default: as saved.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode for each prompt.")] = 48,
    temperature: Annotated[float, typer.Option(help="At which acceptance is observed.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each step.")] = 7,
    seed: Annotated[int, typer.Option(help="Of sampling and interval.")] = 0,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(help="Default: plan.json beside the draft.")] = None,
) -> None:
    """Find the fastest tree for a draft on this machine, or that none is; `--tree plan` then uses it."""
    from rich.console import Console

    from draftwood.decode.certify import built_in_prompts, check_built_in
    from draftwood.decode.planner import make_plan
    from draftwood.decode.propose.plan import FILE
    from draftwood.models.checkpoint import notes_folder

    check_sampling(temperature)
    check_prompts([prompts] if prompts else [], num_prompts)
    if prompts is None:
        check_built_in(num_prompts)
    models = {}
    for dtype in dtypes.split(",") if dtypes else [None]:
        loaded = load_models(target, draft, "dynamic", dtype, device)
        models[str(loaded[0].dtype).removeprefix("torch.")] = loaded
    first = next(iter(models.values()))[0]
    if prompts is None:
        ids = built_in_prompts(first, num_prompts)
    else:
        ids = [p.input_ids for p in prompt_set_of(str(prompts), first.tokenizer, num_prompts, None).prompts]
    with Console(stderr=True).status("") as status:
        planning = make_plan(
            models,
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            repeats=repeats,
            seed=seed,
            folder=draft,
            on_progress=status.update,
        )
    Console().print(planning.table())
    typer.echo(f"{planning.save(out or notes_folder(draft) / FILE)}", err=True)


@app.command()
def compare(
    target: Annotated[str, typer.Argument(help="Built-in name, folder or hub id of the target.")],
    drafts: Annotated[list[Path], typer.Argument(help="Folders of drafts, two or more; the first is compared with.")],
    prompts: Annotated[str, typer.Option(help="As of evaluate.")],
    out: Annotated[Path, typer.Option(help="Folder for the report and the journal.")] = Path("runs/compare"),
    tree: TreeOption = "dynamic",
    max_new_tokens: NewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    num_prompts: Annotated[int | None, typer.Option(help="Prompts from the start of the source.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Leave out longer prompts.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Measure several drafts on the same prompts in one run, with the paired difference of their acceptance."""
    from types import SimpleNamespace

    from rich.console import Console

    from draftwood.decode.compare import compare_drafts

    if len(drafts) < 2 or len(set(drafts)) < len(drafts):
        raise ValueError(f"drafts: got {', '.join(map(str, drafts))}; expected two or more different folders")
    check_sampling(temperature)
    check_prompts([prompts], num_prompts)
    for draft in drafts:
        check_draft(draft, target)
    loaded, first = load_models(target, drafts[0], tree, dtype, device)
    named = {str(drafts[0]): first, **{str(path): load_any_draft(path, loaded) for path in drafts[1:]}}
    comparison = compare_drafts(
        loaded,
        named,
        prompt_set_of(prompts, loaded.tokenizer, num_prompts, max_prompt_tokens),
        SimpleNamespace(tree=tree, max_new_tokens=max_new_tokens, temperature=temperature),
        out,
        Console(stderr=True),
    )
    Console().print(comparison.table())
    typer.echo(f"{comparison.save(out)}", err=True)
