"""Options that several commands share, and what they all do with them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from draftwood.decode.prompts import PromptSet

TargetOption = Annotated[str, typer.Option("--target", help="Built-in name, folder or hub id of the target.")]
TreeOption = Annotated[
    str, typer.Option("--tree", help="chain-<k>, stree, eagle-25, dynamic, dynamic-<draft nodes>, plan or its file.")
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16; default: as saved.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Default: the first GPU, else the CPU.")]
NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", help="Bound on the new tokens of an answer.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0: greedy.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Keep so many tokens of the target's distribution.")]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens of this total share.")]


def load_models(target: str, draft: Path | None, tree: str, dtype: str | None, device: str | None) -> tuple[Any, Any]:
    """Target and draft; the tree's name is checked first, because loading takes longer."""
    from draftwood.decode.propose import resolve_tree
    from draftwood.models.target import load_target

    if not _is_plan(tree):
        resolve_tree(tree)
    loaded = load_target(target, dtype, device)
    if draft is None:
        return loaded, None
    from draftwood.models.checkpoint import load_draft

    return loaded, load_draft(draft, loaded)


def _is_plan(tree: str) -> bool:
    return tree == "plan" or tree.endswith(".json")


def tree_of(tree: str, draft: Path | None, target: Any) -> Any:
    """What `--tree` means: for `plan` the plan in the draft's folder, for a `.json` the plan in it, else a name.

    Raises:
        ValueError: `plan` without a draft, or a plan that does not fit the target.
    """
    if not _is_plan(tree):
        return tree
    if draft is None:
        raise ValueError("--tree plan: there is no draft; give its folder with --draft")
    from draftwood.decode.propose.plan import load_plan

    return load_plan(draft if tree == "plan" else tree, str(target.dtype).removeprefix("torch."))


def prompt_set_of(source: str, tokenizer: Any, limit: int | None, max_tokens: int | None) -> "PromptSet":
    from draftwood.decode.prompts import prompts_from_rows, read_prompts

    kind, colon, folder = source.partition(":")
    if kind in ("validation", "turns") and colon:
        from draftwood.train.prepare import load_rows

        rows = load_rows(folder, "validation")
        return prompts_from_rows(rows, kind, limit=limit, max_tokens=max_tokens, every_turn=kind == "turns")
    return read_prompts(source, tokenizer, limit=limit, max_tokens=max_tokens)
