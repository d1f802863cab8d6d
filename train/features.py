"""Features of the target for training rows: computed when needed, or kept on disk so that later passes are cheap.

The cache is a folder of `index.json`, which says of what target and rows it is, and one safetensors file per block of
consecutive rows with `features` [N, F] bfloat16, `normaliser` [N] float32 and `argmax` [N] int32 of their N tokens. F
is the target's feature width, more than H where it is tapped. A file appears when it is whole, so an interrupted run
goes on where it was. Files are memory-mapped when read.
"""

import json
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwood.kernels.distill_loss import DistillHead, TeacherStatistics, teacher_statistics
from draftwood.models.fingerprint import fingerprint
from draftwood.models.hybrid import matrix_scan
from draftwood.models.target import Target
from draftwood.train.batches import Rows, RowSizes

FORMAT = 1
GB = 1e9
_BYTES_PER_BLOCK = 64 << 20
_OPEN_FILES = 64
_ROWS_PER_CHUNK = 256
_INDEX = "index.json"
logger = logging.getLogger(__name__)

RowFeatures = tuple[Tensor, TeacherStatistics]


class FeatureError(ValueError):
    """A feature cache that does not fit, and what to do about it."""


@dataclass(frozen=True)
class FeatureSource:
    """Features of rows by number: from `cache` where it has them, else by a forward of the target.

    Attributes:
        precision: dtype that the target's forward is autocast to; None is the target's own.
        compiled: the statistics through `torch.compile`.
    """

    target: Target
    rows: Rows
    head: DistillHead
    precision: torch.dtype | None = None
    cache: "FeatureCache | None" = None
    compiled: bool = False

    def __call__(self, numbers: Sequence[int]) -> list[RowFeatures]:
        """Of each row its features [T, F] and their statistics [T]."""
        cached = {i: self.cache.read(i) for i in numbers if self.cache is not None and i < self.cache.num_rows}
        missing = [i for i in numbers if i not in cached]
        computed = dict(zip(missing, self.compute(missing), strict=True))
        return [cached[i] if i in cached else computed[i] for i in numbers]

    @torch.no_grad()
    def compute(self, numbers: Sequence[int]) -> list[RowFeatures]:
        """By one forward of the target over all the rows."""
        if not numbers:
            return []
        ids = [torch.as_tensor(np.asarray(self.rows[i]["input_ids"], dtype=np.int64)) for i in numbers]
        # Padding stands on the right of a causal model: nothing before it sees it, so no mask is needed.
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.target.device)
        # Without fused kernels a Bamba target is faster in matrix form; the values are the same up to rounding.
        scan = matrix_scan() if padded.device.type == "cpu" else nullcontext()
        with scan, torch.autocast(padded.device.type, self.precision, enabled=self.precision is not None):
            hidden = self.target.features(padded)
        features = [row[: len(i)] for row, i in zip(hidden, ids, strict=True)]
        flat = torch.cat(features)
        if not bool(flat.isfinite().all()):
            raise FeatureError(f"{self.target.name}: features of rows {list(numbers)} are not finite")
        statistics = teacher_statistics(flat[:, -self.target.hidden_dim :], self.head, _ROWS_PER_CHUNK, self.compiled)
        lengths = [len(i) for i in ids]
        pairs = zip(statistics.normaliser.split(lengths), statistics.argmax.split(lengths), strict=True)
        return [(f, TeacherStatistics(*pair)) for f, pair in zip(features, pairs, strict=True)]


class FeatureCache:
    """Features of the first `num_rows` rows of a data set, as many as fit into `max_bytes`.

    Made by `open_cache`; complete once every process has called `fill`.
    """

    def __init__(self, folder: Path, lengths: np.ndarray, feature_dim: int, max_bytes: float):
        self.folder = folder
        self.feature_dim = feature_dim
        self._lengths = lengths
        self._ends = np.cumsum(lengths)
        starts = self._ends - lengths
        tokens_per_block = max(1, _BYTES_PER_BLOCK // self.bytes_per_token)
        block_of_row = starts // tokens_per_block
        blocks = [np.flatnonzero(block_of_row == b) for b in np.unique(block_of_row)]
        # Whole blocks only, so that a larger budget keeps what a smaller one wrote.
        self.blocks = [b for b in blocks if self._ends[b[-1]] * self.bytes_per_token <= max_bytes]
        self.num_rows = sum(map(len, self.blocks))
        self._block_of_row = np.repeat(np.arange(len(self.blocks)), [len(b) for b in self.blocks])
        self._open: OrderedDict[int, Any] = OrderedDict()

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.feature_dim + 8

    @property
    def num_tokens(self) -> int:
        return int(self._ends[self.num_rows - 1]) if self.num_rows else 0

    def path(self, block: int) -> Path:
        return self.folder / f"features-{block:05d}.safetensors"

    def missing(self) -> list[int]:
        """Blocks that are not on disk yet."""
        return [b for b in range(len(self.blocks)) if not self.path(b).exists()]

    def describe(self) -> str:
        """The predicted size, before anything is computed."""
        there = sum(self.path(b).stat().st_size for b in range(len(self.blocks)) if self.path(b).exists())
        text = (
            f"features: {self.num_tokens:,} tokens of {self.num_rows:,} rows, "
            f"{self.num_tokens * self.bytes_per_token / GB:.2f} GB in {self.folder}"
        )
        if there:
            text += f", {there / GB:.2f} GB of it there"
        if self.num_rows < len(self._lengths):
            beyond = len(self._lengths) - self.num_rows
            text += f"; {beyond:,} rows beyond features.max_gb are computed anew whenever they are needed"
        return text

    def fill(
        self,
        source: FeatureSource,
        tokens_per_batch: int,
        process_index: int = 0,
        num_processes: int = 1,
        console: Console | None = None,
    ) -> None:
        """Computes this process's share of the missing blocks. `tokens_per_batch` includes padding.

        Raises:
            FeatureError: the disk has too little room.
        """
        missing = self.missing()
        self._check_room(missing)
        mine = [b for b in missing if b % num_processes == process_index]
        total = int(sum(self._lengths[self.blocks[b]].sum() for b in mine))
        if not total:
            return
        started = time.perf_counter()
        columns = (TextColumn("features"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=console is None) as progress:
            task, done = progress.add_task("", total=total, rate=""), 0
            for block in mine:
                parts: dict[int, RowFeatures] = {}
                for batch in _by_length(self.blocks[block], self._lengths, tokens_per_batch):
                    parts |= zip(batch, source.compute(batch), strict=True)
                    done += int(self._lengths[batch].sum())
                    rate = done / (time.perf_counter() - started)
                    progress.update(task, completed=done, rate=f"{rate:,.0f} tokens/s")
                self._write(block, [parts[int(i)] for i in self.blocks[block]])
        seconds = time.perf_counter() - started
        logger.info("features of %s tokens in %.0f s, %.0f tokens/s", f"{total:,}", seconds, total / seconds)

    def read(self, row: int) -> RowFeatures:
        """Features [T, F] bfloat16 and statistics [T] of row number `row`, below `num_rows`."""
        block = int(self._block_of_row[row])
        file = self._open.get(block)
        if file is None:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)
            file = self._open[block] = safe_open(self.path(block), framework="pt")
        end = int(self._ends[row] - self._ends[self.blocks[block][0]] + self._lengths[self.blocks[block][0]])
        part = slice(end - int(self._lengths[row]), end)
        features, normaliser, argmax = (file.get_slice(name)[part] for name in ("features", "normaliser", "argmax"))
        return features, TeacherStatistics(normaliser, argmax.long())

    def _write(self, block: int, parts: list[RowFeatures]) -> None:
        tensors = {
            "features": torch.cat([f for f, _ in parts]).to(torch.bfloat16),
            "normaliser": torch.cat([s.normaliser for _, s in parts]).float(),
            "argmax": torch.cat([s.argmax for _, s in parts]).to(torch.int32),
        }
        if not bool(tensors["features"].any()):
            raise FeatureError("the target's features are all zero; a draft trained on them accepts nothing")
        partial = self.path(block).with_suffix(".partial")
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)
        partial.replace(self.path(block))

    def _check_room(self, missing: list[int]) -> None:
        needed = sum(int(self._lengths[self.blocks[b]].sum()) for b in missing) * self.bytes_per_token
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise FeatureError(
                f"{self.folder}: features need {needed / GB:.1f} GB more, the disk has {free / GB:.1f} GB; lower "
                "features.max_gb (the rest is computed anew each time) or set features.folder to a larger disk"
            )


def open_cache(
    folder: Path, target: Target, sizes: RowSizes, precision: torch.dtype | None, max_gb: float, rebuild: bool
) -> FeatureCache:
    """The cache in `folder` for this target and these rows, empty or partly or wholly filled.

    Args:
        rebuild: clear a folder that holds features of something else, with a message; otherwise that is an error.

    Raises:
        FeatureError: what the features there are of, where it is not this.
    """
    wanted = {
        "format": FORMAT,
        "target": fingerprint(target),
        "taps": list(target.taps),
        "rows": sizes.digest,
        "precision": str(precision or target.dtype),
        "bytes_per_block": _BYTES_PER_BLOCK,
    }
    index = folder / _INDEX
    if index.exists():
        found = {"taps": [], **json.loads(index.read_text(encoding="utf-8"))}
        differing = sorted(key for key in wanted if found.get(key) != wanted[key])
        if differing:
            what = f"{folder} holds features of another {', '.join(differing)}"
            if not rebuild:
                raise FeatureError(f"{what}; set features.folder to another folder or delete this one")
            logger.warning("%s: they are computed again", what)
            index.unlink()
            for file in folder.glob("features-*"):
                file.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    if not index.exists():
        index.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    return FeatureCache(folder, sizes.lengths, target.feature_dim, max_gb * GB)


def _by_length(rows: np.ndarray, lengths: np.ndarray, tokens_per_batch: int) -> list[list[int]]:
    """Rows of similar length together, longest first, each batch within the tokens allowed with its padding."""
    batches: list[list[int]] = []
    for row in rows[np.argsort(-lengths[rows], kind="stable")]:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens_per_batch:
            batches[-1].append(int(row))
        else:
            batches.append([int(row)])
    return batches
