"""Checkpoints of a run: the draft, and beside it all that training needs to go on as if it had never stopped.

<run>/checkpoints/step-00000200/   draft.safetensors, draft.json, training.pt, SHA256SUMS
<run>/best/                        the draft of the best validation, without training state
"""

import logging
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftwood.configs.schema import RunConfig
from draftwood.models.checkpoint import save_draft
from draftwood.models.draft_base import Draft
from draftwood.train.fingerprint import file_sha256

FORMAT = 2  # of the training state; 1 had no number
_WEIGHTS, _STATE, _SUMS = "draft.safetensors", "training.pt", "SHA256SUMS"
_PREFIX, _PARTIAL, _DAMAGED = "step-", ".partial-", "damaged-"
_PACKAGES = ("draftwood", "torch", "transformers", "accelerate", "datasets")
logger = logging.getLogger(__name__)


class DamagedCheckpoint(ValueError):
    """A checkpoint that is cut off, or not what was written."""


class OldCheckpoint(ValueError):
    """A checkpoint of a version whose training state this one can't go on from."""


class Checkpoints:
    """The checkpoints of the run in `folder`; only the main process writes.

    Args:
        keep: latest checkpoints that stay, beside the best draft.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder / "checkpoints"
        self.best = folder / "best"
        self.keep = keep

    def steps(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob(f"{_PREFIX}*") if (path / _STATE).is_file())

    def latest(self) -> Path | None:
        return self.steps()[-1] if self.steps() else None

    def save(
        self, step: int, draft: Draft, weights: dict[str, Tensor], provenance: dict[str, Any], state: dict[str, Any]
    ) -> Path:
        """Writes a checkpoint that appears when it is whole, and removes those beyond `keep`.

        Args:
            weights: the draft's, whole.
        """
        path = self.folder / f"{_PREFIX}{step:08d}"
        partial = self.folder / f"{_PARTIAL}{path.name}"
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{_PARTIAL}*"):  # of a process that was killed
            shutil.rmtree(leftover)
        save_draft(draft, partial, provenance, weights)
        torch.save({"format": FORMAT, **state}, partial / _STATE)
        sums = [f"{file_sha256(partial / name)}  {name}\n" for name in (_WEIGHTS, _STATE)]
        (partial / _SUMS).write_text("".join(sums), encoding="utf-8")
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(old)
        return path

    def set_aside(self, damaged: list[Path]) -> None:
        """Renames checkpoints so that they count for nothing, neither to go on from nor among those kept."""
        for path in damaged:
            aside = path.with_name(f"{_DAMAGED}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)

    def save_best(self, draft: Draft, weights: dict[str, Tensor], provenance: dict[str, Any]) -> None:
        """Writes the draft alone as the best so far; a reader sees the old one or the new one, whole."""
        fresh = self.best.with_name(f"{_PARTIAL}best")
        old = self.best.with_name(f"{_PARTIAL}old-best")
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        save_draft(draft, fresh, provenance, weights)
        if self.best.exists():
            self.best.rename(old)
        fresh.rename(self.best)
        shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The draft's weights in checkpoint `path`, whole, and the training state saved with them, on the CPU.

    Raises:
        DamagedCheckpoint: a file is missing or not what was written.
        OldCheckpoint: it is whole, but of an older version.
    """
    if not (path / _SUMS).exists() and (path / _WEIGHTS).exists():  # which the first version did not write
        raise _old(path)
    try:
        lines = [line.split() for line in (path / _SUMS).read_text(encoding="utf-8").splitlines()]
        sums = {name: digest for digest, name in lines}
        wrong = [name for name in (_WEIGHTS, _STATE) if sums.get(name) != file_sha256(path / name)]
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({error})") from None
    if wrong:
        raise DamagedCheckpoint(f"{path} is damaged ({', '.join(wrong)} is cut off or changed)")
    state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    if state.get("format") != FORMAT:
        raise _old(path)
    return load_file(path / _WEIGHTS), state


def _old(path: Path) -> OldCheckpoint:
    return OldCheckpoint(
        f"{path} is of another version of draftwood, whose training state this one can't read; finish the run with "
        f"that version, or begin a new one from its weights: another name and draft.init_from={path}"
    )


def random_state() -> dict[str, Any]:
    """torch's generators. Training itself draws from (seed, epoch, row) alone, whatever they hold."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])


def provenance(config: RunConfig, **facts: Any) -> dict[str, Any]:
    """How a checkpoint came about: the resolved config, code and package versions, the command, and `facts`."""
    return {
        "config": config.model_dump(mode="json"),
        "git": _git_commit(),
        "versions": package_versions(),
        "argv": sys.argv,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }


def package_versions() -> dict[str, str | None]:
    """Of Python and the packages that a result depends on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git_commit() -> str | None:
    """The commit of the source tree, with `+changes` where it has uncommitted ones; None for an installed package."""
    here = Path(__file__).resolve().parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return commit + "+changes" if _git(here, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return ran.stdout.strip()
