"""Options that several commands share, and what they all do with them."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from draftwood.decode.prompts import PromptSet

TargetOption = Annotated[str, typer.Option("--target", help="Built-in name, folder or hub id of the target.")]
DraftOption = Annotated[Path | None, typer.Option(help="Folder of a draft, or model:<language model>.")]
SeedOption = Annotated[int | None, typer.Option(help="Of the sampling.")]
TreeOption = Annotated[
    str,
    typer.Option(
        "--tree", help="As dynamic-16, chain-4, lookup; plan or its file. A wrong name is answered with all forms."
    ),
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16; default: as saved.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Default: the first GPU, else the CPU.")]
NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Bound on the new tokens of an answer.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0: greedy.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Keep so many tokens of the target's distribution.")]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens of this total share.")]


def load_models(
    target: str, draft: Path | None, tree: str, dtype: str | None, device: str | None, temperature: float | None = None
) -> tuple[Any, Any]:
    """Target and draft; the tree, at `temperature` where one is given, and that the draft is of the target are checked
    first: loading takes longer."""
    from draftwood.models.target import load_target

    check_tree(tree, temperature)
    if draft is not None:
        check_draft(draft, target)
    check_plan(tree, draft)
    loaded = load_target(target, dtype, device)
    if draft is None:
        return loaded, None
    return loaded, load_any_draft(draft, loaded)


def check_tree(tree: str, temperature: float | None = None) -> None:
    """Raises:
    ValueError: `--tree` names no tree, or one that cannot be filled at `temperature`.
    """
    from draftwood.decode.propose import check_temperature, resolve_tree

    if not _is_plan(tree):
        settings = resolve_tree(tree)
        if temperature is not None:
            check_temperature(settings, temperature)


def check_plan(tree: str, draft: Path | None) -> None:
    """Raises:
    FileNotFoundError: the plan that `--tree` names is not there; without a draft there is nothing to plan.
    ValueError: it is not a plan, or was made for other weights than the draft's are now.
    """
    from draftwood.decode.propose.plan import check_weights

    if draft is not None and _is_plan(tree):
        check_weights(draft if tree == "plan" else tree, draft)


def check_draft(draft: Path, target: str) -> None:
    """Raises:
    FileNotFoundError, ValueError: `draft` is no draft, or plainly one of another target; language models pass.
    """
    if _is_model(draft):
        return
    from draftwood.models.checkpoint import check_draft as check
    from draftwood.models.target import load_config

    check(draft, target, load_config(target))


def check_sampling(temperature: float, top_k: int | None = None, top_p: float | None = None) -> None:
    """Raises:
    ValueError: the setting at fault and its range.
    """
    from draftwood.decode.verify import Sampling

    Sampling(temperature, top_k, top_p)


def check_prompts(sources: Iterable[str | Path], limit: int | None) -> None:
    """That the files among `sources` can be read as prompts, before anything is loaded.

    Raises:
        FileNotFoundError, ValueError: no such file, or what is wrong in its first `limit` entries.
    """
    from draftwood.decode.prompts import read_conversations

    for source in sources:
        if not _rows_of(str(source)) and not Path(source).is_fifo():  # a pipe can be read only once
            for _ in islice(read_conversations(source), limit):
                pass


def load_any_draft(draft: Path, target: Any) -> Any:
    """A draft checkpoint; of `model:<built-in name, folder or hub id>`, or a folder with a model, a `LanguageDraft`."""
    if _is_model(draft):
        from draftwood.models.language_draft import LanguageDraft

        return LanguageDraft.load(str(draft).removeprefix("model:"), target)
    from draftwood.models.checkpoint import load_draft

    return load_draft(draft, target)


def _is_model(draft: Path) -> bool:
    has_config = (draft / "config.json").is_file() and not (draft / "draft.json").is_file()
    return str(draft).startswith("model:") or has_config


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

    if prepared := _rows_of(source):
        from draftwood.train.prepare import load_rows

        kind, folder = prepared
        rows = load_rows(folder, "validation")
        return prompts_from_rows(rows, kind, limit=limit, max_tokens=max_tokens, every_turn=kind == "turns")
    return read_prompts(source, tokenizer, limit=limit, max_tokens=max_tokens)


def _rows_of(source: str) -> tuple[str, str] | None:
    """Kind and folder of a source that is prepared rows; None for a file."""
    kind, colon, folder = source.partition(":")
    return (kind, folder) if colon and kind in ("validation", "turns") else None
