"""Draft checkpoints: a folder with `draft.safetensors`, only the draft's own weights, and `draft.json`."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from draftwood.models.assets import cache_root, shipped_path
from draftwood.models.draft_base import Draft
from draftwood.models.draft_kinds import KINDS

if TYPE_CHECKING:
    from draftwood.models.target import Target

FORMAT = 1
_WEIGHTS, _DESCRIPTION = "draft.safetensors", "draft.json"
_SHAPE = ("model_type", "vocab_size", "hidden_dim", "num_layers")  # of a target, as its config has it


def save_draft(
    draft: Draft,
    folder: str | Path,
    provenance: dict[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes the draft's weights and a description of it, its target and how it came about.

    Args:
        weights: the draft's state dict, where it was gathered from several processes; None takes the draft's own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = draft.state_dict() if weights is None else weights
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / _WEIGHTS)
    description = {
        "format": FORMAT,
        "kind": draft.kind,
        "config": draft.config.to_dict(),
        "target": _describe(draft.target),
        "provenance": provenance or {},
    }
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return folder


def draft_folder(path: str | Path) -> Path:
    """The folder of a draft: `path` where a draft is in it, else one that comes with the package, by its name."""
    shipped = shipped_path(str(path))
    has_own = (Path(path) / _DESCRIPTION).is_file()
    return shipped if not has_own and (shipped / _DESCRIPTION).is_file() else Path(path)


def weights_sha256(draft: str | Path) -> str | None:
    """sha256 of the weights of `draft_folder(draft)`, by the names of the files; None where there are none."""
    files = sorted(draft_folder(draft).glob("*.safetensors"))
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest() if files else None


def notes_folder(draft: str | Path) -> Path:
    """Where a draft's plan and certificate are kept: its own folder; of one that is known by a name, as it comes with
    the package or is `model:<language model>`, a folder in the cache, since its own may not be writable."""
    name = str(draft).removeprefix("model:")
    folder = draft_folder(name)
    is_shipped = folder.parent == shipped_path("")
    is_remote = str(draft).startswith("model:") and not folder.is_dir()
    return cache_root() / "drafts" / name.replace("/", "--") if is_shipped or is_remote else folder


def load_draft(path: str | Path, target: "Target") -> Draft:
    """The draft of `draft_folder(path)` for `target`, on its device and in its dtype, ready to decode.

    Raises:
        FileNotFoundError: the folder or a file of it is not there.
        ValueError: not a draft checkpoint, or one of another target (vocabulary, width or head differ).
    """
    folder = draft_folder(path)
    description = _read_description(folder)
    try:
        weights = load_file(folder / _WEIGHTS)
    except SafetensorError as error:
        raise _damaged(folder, error) from None
    _check_target(path, description["target"], _describe(target))
    kind = KINDS[description["kind"]]
    draft = kind(kind.config_type.from_dict(description["config"]), target, weights.get("draft_vocab"))
    for name, parameter in draft.state_dict().items():
        if name in weights and weights[name].shape != parameter.shape:
            raise ValueError(
                f"{folder / _WEIGHTS}: {name} is {list(weights[name].shape)}, by draft.json {list(parameter.shape)}"
            )
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise ValueError(f"{folder / _WEIGHTS}: lacks {missing or 'nothing'}, has unknown {unexpected or 'nothing'}")
    return draft.to(device=target.device, dtype=target.dtype).eval()


def check_draft(path: str | Path, name: str, config: PretrainedConfig) -> None:
    """That the draft of `draft_folder(path)` is for a target of this name and config, as far as its weights need not
    be loaded for it.

    Raises:
        FileNotFoundError, ValueError: as `load_draft`.
    """
    text = config.get_text_config()
    given = {
        "name": name,
        "model_type": config.model_type,
        "vocab_size": text.vocab_size,
        "hidden_dim": text.hidden_size,
        "num_layers": text.num_hidden_layers,
    }
    _check_target(path, _read_description(draft_folder(path))["target"], given)


def _read_description(folder: Path) -> dict[str, Any]:
    """`draft.json`, with a format and a kind of this version and all that is read of it."""
    for name in (_DESCRIPTION, _WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder}: no {name}; expected a folder that `draftwood distill` wrote")
    file = folder / _DESCRIPTION
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(folder, error) from None
    if not isinstance(description, dict):
        raise ValueError(f"{file}: a {type(description).__name__}, not an object; this is not a draft checkpoint")
    version, kind = description.get("format"), description.get("kind")
    if version != FORMAT or kind not in list(KINDS):
        raise ValueError(
            f"{file}: format {version}, kind {kind!r}; this version reads format {FORMAT}, kinds {', '.join(KINDS)}"
        )
    for key, fields in (("target", ("name", *_SHAPE, "head_sample")), ("config", ())):
        section = description.get(key)
        if not isinstance(section, dict):
            raise ValueError(f"{file}: no '{key}'; this is not a draft checkpoint")
        if missing := [field for field in fields if field not in section]:
            raise ValueError(f"{file}: '{key}' has no {', '.join(missing)}; this is not a draft checkpoint")
    return description


def _damaged(folder: Path, error: Exception) -> ValueError:
    return ValueError(f"{folder}: damaged draft checkpoint ({error}); take another or train it anew")


def _describe(target: "Target") -> dict[str, Any]:
    weight = target.head_weight
    rows = torch.linspace(0, target.vocab_size - 1, 8, device=weight.device).long()
    return {
        "name": target.name,
        "model_type": target.config.model_type,
        "vocab_size": target.vocab_size,
        "hidden_dim": target.hidden_dim,
        "num_layers": target.config.get_text_config().num_hidden_layers,
        # A few values of the head, enough to tell two models of one shape apart in any dtype.
        "head_sample": weight[rows, : min(4, target.hidden_dim)].float().flatten().tolist(),
    }


def _check_target(draft: str | Path, trained: dict[str, Any], given: dict[str, Any]) -> None:
    """`given` without a `head_sample` is compared without it."""
    for key in _SHAPE:
        if trained[key] != given[key]:
            raise ValueError(
                f"{draft}: trained for {trained['name']} with {key} {trained[key]}, but {given['name']} has "
                f"{given[key]}; give the target it was trained for: --target {trained['name']}"
            )
    if "head_sample" not in given:
        return
    was, now = torch.tensor(trained["head_sample"]), torch.tensor(given["head_sample"])
    if not torch.allclose(was, now, rtol=2e-2, atol=2e-2 * was.abs().max().item()):
        raise ValueError(
            f"{draft}: trained for {trained['name']}, and {given['name']} has the same shape but another head; "
            f"a draft only fits the very target it was distilled from: --target {trained['name']}"
        )
