"""Where conversations come from: files, data sets that `datasets` can load, and how much of each is used.

    SourceConfig.parse("sharegpt"), SourceConfig.parse("more.parquet:0.5"), SourceConfig.parse("owner/name#test_sft")

| path | read as |
|---|---|
| a built-in asset's name | its file |
| a file | Parquet if it is one, else JSON or JSON Lines (`conversations.py`) |
| a folder | what `datasets` saved there, else what `load_dataset` makes of its files |
| owner/name | a data set of the Hugging Face hub |

Whatever the source, a row that can't be used is an error of that row; only a source that holds no rows is refused.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from draftwood.configs.schema import SourceConfig
from draftwood.models.assets import asset_path, is_asset
from draftwood.train.conversations import TURN_KEYS, RowError, SourceRow, read_rows
from draftwood.train.fingerprint import file_sha256, text_sha256

SourceLike = str | Path | SourceConfig
_COLUMNS = ("id", *TURN_KEYS)
_ROWS_TOGETHER = 256
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".json", ".jsonl", ".parquet", ".txt", ".csv", ".arrow", ".gz", ".zst")


class Source:
    """One source of conversations, found and ready to be read.

    Raises:
        ValueError: there is no such file, folder or data set, or none of its columns holds turns.
    """

    def __init__(self, config: SourceConfig):
        self.weight = config.weight
        self.given = config.path if config.split is None else f"{config.path}#{config.split}"
        path = asset_path(config.path) if is_asset(config.path) else Path(config.path)
        self.name = path.name if path.exists() else self.given
        self._path: Path | None = None
        self._data: Dataset | None = None
        if path.is_file():
            if config.split is not None:
                raise ValueError(f"{self.given}: {path.name} is a file and has no splits; leave #{config.split} out")
            self._path = path
        else:
            self._data = _load(config, path)
            _check_columns(self._data.column_names, self.given)

    def rows(self) -> Iterator[SourceRow]:
        """Every row, in order.

        Raises:
            ValueError: the file is empty, damaged as a whole, or of another kind.
        """
        if self._data is not None:
            columns = [name for name in self._data.column_names if name in _COLUMNS]
            table = self._data.select_columns(columns).with_format("arrow")
            try:
                yield from _arrow_rows(batch for part in table.iter(_ROWS_TOGETHER) for batch in part.to_batches())
            except pa.ArrowException as error:
                raise ValueError(f"{self.given} is damaged: {_first_line(error)}") from error
        elif self._path is not None and _is_parquet(self._path):
            yield from _parquet_rows(self._path)
        elif self._path is not None:
            yield from read_rows(self._path)

    def sha256(self) -> str:
        """Of the file, or of the files that the data set is stored in."""
        if self._path is not None:
            return file_sha256(self._path)
        assert self._data is not None
        return text_sha256(json.dumps([file_sha256(Path(file["filename"])) for file in self._data.cache_files]))


def open_sources(sources: SourceLike | Sequence[SourceLike]) -> list[Source]:
    """Every source, in order; strings are parsed as `SourceConfig.parse` does.

    Raises:
        ValueError: none is given, one twice, or as `Source`.
    """
    given = [sources] if isinstance(sources, SourceLike) else list(sources)
    configs = [one if isinstance(one, SourceConfig) else SourceConfig.parse(str(one)) for one in given]
    if not configs:
        raise ValueError("no source of conversations is given")
    places = [(config.path, config.split) for config in configs]
    if twice := [path for i, (path, split) in enumerate(places) if (path, split) in places[:i]]:
        raise ValueError(f"the source {twice[0]} is given twice; to repeat its conversations write {twice[0]}:2")
    opened = [Source(config) for config in configs]
    names = [source.name for source in opened]
    for source in opened:
        if names.count(source.name) > 1:
            source.name = source.given
    return opened


def copies(digest: str, weight: float, seed: int) -> int:
    """How often a conversation of a source of this weight is used: the weight itself, rounded down or up by its hash.

    A conversation that is used at a weight is used at every higher one too.
    """
    draw = int.from_bytes(hashlib.sha256(f"weight {seed} {digest}".encode()).digest()[:8], "big") / 2**64
    return int(weight) + (draw < weight - int(weight))


def _load(config: SourceConfig, path: Path) -> Dataset:
    is_hub = not path.exists()
    before, colon, weight = config.path.rpartition(":")
    if is_hub and colon and (is_asset(before) or Path(before).exists()):
        raise ValueError(f"{config.path}: the weight '{weight}' is not a number above 0, as in {before}:0.5")
    if is_hub and (not _HUB_ID.fullmatch(config.path) or path.suffix in _FILE_SUFFIXES):
        raise ValueError(
            f"{config.path}: no such file or folder; a source is a file, a folder saved by datasets, a hub id "
            "(owner/name) or `sharegpt`"
        )
    is_saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    try:
        data = load_from_disk(str(path)) if is_saved else load_dataset(config.path)
    except Exception as error:  # datasets raises whatever the files, the network or the hub come up with
        what = "the hub has no such data set, or it can't be reached" if is_hub else "datasets can't load this folder"
        raise ValueError(f"{config.path}: {what}: {_first_line(error)}") from error
    if isinstance(data, Dataset):
        if config.split is not None:
            raise ValueError(f"{config.path}: one data set without splits; leave #{config.split} out")
        return data
    return _choose_split(data, config)


def _choose_split(data: DatasetDict, config: SourceConfig) -> Dataset:
    wanted = config.split or (next(iter(data)) if len(data) == 1 else "train")
    if wanted not in data:
        raise ValueError(
            f"{config.path} has no split {wanted!r} but {', '.join(data)}; name one as {config.path}#{next(iter(data))}"
        )
    return data[wanted]


def _check_columns(names: Sequence[str], where: str) -> None:
    if not any(key in names for key in TURN_KEYS):
        raise ValueError(
            f"{where} has no column {' or '.join(TURN_KEYS)}, which hold the turns; its columns are {', '.join(names)}"
        )


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1" or path.suffix == ".parquet"


def _parquet_rows(path: Path) -> Iterator[SourceRow]:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_columns(names, str(path))
            columns = [name for name in names if name in _COLUMNS]
            yield from _arrow_rows(file.iter_batches(_ROWS_TOGETHER, columns=columns))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no whole Parquet file: {_first_line(error)}") from error


def _arrow_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[SourceRow]:
    number = 0
    for batch in batches:
        for i in range(batch.num_rows):
            number += 1
            try:
                value: Any = batch.slice(i, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield SourceRow(number, None, error=RowError("not_unicode", str(error)))
            else:
                yield SourceRow(number, None, value)


def _first_line(error: Exception) -> str:
    first = error.__cause__ or error
    return (str(first).strip() or type(first).__name__).splitlines()[0]
