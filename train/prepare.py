"""From a file of conversations to Arrow folders of training rows, with an account of every row.

    account = prepare("sharegpt.json", tokenizer, "runs/data", max_length=2048, num_validation=200, seed=0)
    train = load_rows("runs/data", "train")      # input_ids, loss_mask, source_row, source_id, prompt

Prepare before the process group of a distributed run exists, or the other ranks time out while they wait; a second call
with the same settings finds the finished folder.
"""

import json
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value, load_from_disk
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import from_numpy
from transformers import PreTrainedTokenizerBase

from draftwood.models.assets import asset_path, is_asset
from draftwood.train.conversations import RowError, SourceRow, parse_turns, read_rows
from draftwood.train.fingerprint import file_sha256, text_sha256, tokenizer_settings
from draftwood.train.parallel import map_rows
from draftwood.train.report import ACCOUNT_FILE, RowAccount, SplitCount
from draftwood.train.rows import Row, RowBuilder, supervised_rows
from draftwood.train.split import choose_validation
from draftwood.train.turns import Message, TurnPolicy, normalise_turns

SPLITS = ("train", "validation")
FORMAT = 1  # raise it when the same settings would give other rows
FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
        "source_row": Value("int64"),
        "source_id": Value("string"),
        "prompt": List({"role": Value("string"), "content": Value("string")}),
    }
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversation:
    """A row of the source that got through the turn policy. `digest`: of its messages."""

    number: int
    line: int
    source_id: str
    messages: list[Message]
    changes: Counter[str]
    digest: str


@dataclass(frozen=True)
class _Kept:
    source_id: str
    digest: str
    tokens: int
    supervised: int


def prepare(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    *,
    max_length: int,
    num_validation: int,
    seed: int = 0,
    parts_by_id: bool = True,
    policy: TurnPolicy | None = None,
    template_options: Mapping[str, Any] | None = None,
    limit: int | None = None,
    num_proc: int = 1,
    overwrite: bool = False,
    console: Console | None = None,
) -> RowAccount:
    """Write `train` and `validation` rows and `account.json` into `out_dir`, or reuse them if they are there.

    The folder appears when it is whole. The split goes by a hash of the conversation and `seed`: it does not depend on
    the order of the file, and conversations that are equal or parts of one (`split.py`) are on one side.

    Args:
        source: JSON or JSON Lines file, see `conversations.py`, or a built-in asset's name.
        max_length: tokens per row at most.
        num_validation: rows held out, exactly.
        parts_by_id: rows whose ids are `<7 letters or digits>_<number>` with one stem are parts of one conversation.
        limit: only the first so many entries of the source.
        num_proc: processes that render and tokenise.
        overwrite: replace a folder that was prepared with other settings.
        console: for progress; None is stderr.

    Raises:
        ValueError: the source is no such file, no row is left, fewer rows than `num_validation` + 1, or `out_dir` holds
            other data (the message says which settings differ).
    """
    source = asset_path(str(source)) if is_asset(source) else Path(source)
    out_dir = Path(out_dir).absolute()
    policy = policy or TurnPolicy()
    build = RowBuilder(tokenizer, max_length=max_length, policy=policy, template_options=template_options)
    settings = {
        "format": FORMAT,
        "source_sha256": file_sha256(source),
        **tokenizer_settings(tokenizer),
        "template_options": dict(template_options or {}),
        "max_length": max_length,
        "num_validation": num_validation,
        "seed": seed,
        "parts_by_id": parts_by_id,
        "limit": limit,
        "policy": {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(policy).items()},
    }
    account = RowAccount(source.name, settings=settings, fingerprint=text_sha256(json.dumps(settings, sort_keys=True)))
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out_dir.parent / f".{out_dir.name}.lock"):
        if finished := _find_finished(out_dir, account, overwrite):
            logger.info("rows in %s are reused", out_dir)
            return finished
        for leftover in out_dir.parent.glob(f".{out_dir.name}-partial-*"):  # of a run that was killed
            shutil.rmtree(leftover)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-partial-", dir=out_dir.parent))
        try:
            _write(source, build, scratch, account, num_proc, console or Console(stderr=True))
            if out_dir.exists():
                shutil.rmtree(out_dir)
            scratch.chmod(0o755)
            scratch.rename(out_dir)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return account


def load_rows(out_dir: str | Path, split: str) -> Dataset:
    """A split written by `prepare`: input_ids [T] and loss_mask [T] lists, source_row, source_id, prompt (messages).

    Raises:
        ValueError: unknown split, or a folder that `prepare` has not finished.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
    if not (Path(out_dir) / ACCOUNT_FILE).exists():
        raise ValueError(f"{out_dir} holds no prepared rows ({ACCOUNT_FILE} is missing): run prepare first")
    return load_from_disk(str(Path(out_dir) / split))


def _find_finished(out_dir: Path, wanted: RowAccount, overwrite: bool) -> RowAccount | None:
    if not out_dir.exists() or not any(out_dir.iterdir()):
        return None
    if not (out_dir / ACCOUNT_FILE).exists():
        raise ValueError(f"{out_dir} exists and holds no prepared rows: choose another folder")
    found = RowAccount.load(out_dir)
    if found.fingerprint == wanted.fingerprint:
        return found
    if overwrite:
        return None
    differing = [key for key in wanted.settings if wanted.settings[key] != found.settings.get(key)]
    raise ValueError(
        f"{out_dir} was prepared with another {', '.join(differing)}: choose another folder, or pass overwrite=True"
    )


def _write(source: Path, build: RowBuilder, folder: Path, account: RowAccount, num_proc: int, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    all_rows = folder / "all.arrow"
    kept: list[_Kept] = []
    with Progress(*columns, console=console, transient=True) as progress:
        # Reading is a hundred times faster than tokenising, so counting first costs little and the bar knows its end.
        task = progress.add_task("Tokenising conversations", total=sum(1 for _ in _limited(source, account)))
        with ArrowWriter(path=str(all_rows), features=FEATURES) as writer:
            for conversation, outcome in map_rows(build, _conversations(source, account, build.policy), num_proc):
                progress.update(task, completed=conversation.number)
                if isinstance(outcome, RowError):
                    account.drop(conversation.number, conversation.line, outcome)
                    continue
                account.change(conversation.number, conversation.changes + outcome.changes)
                account.max_token_id = max(account.max_token_id, int(outcome.input_ids.max()))
                supervised = int(supervised_rows(from_numpy(outcome.loss_mask)).sum())
                kept.append(_Kept(conversation.source_id, conversation.digest, len(outcome.input_ids), supervised))
                writer.write(_record(conversation, outcome))
            if kept:
                writer.finalize()
    if not kept:
        raise ValueError(_nothing_left(account))
    validation = choose_validation(
        [(row.source_id, row.digest) for row in kept],
        account.settings["num_validation"],
        account.settings["seed"],
        account.settings["parts_by_id"],
    )
    rows = Dataset.from_file(str(all_rows))
    for split in SPLITS:
        indices = [i for i in range(len(kept)) if (i in validation) == (split == "validation")]
        rows.select(indices).save_to_disk(str(folder / split))
        account.splits[split] = SplitCount(
            len(indices), sum(kept[i].tokens for i in indices), sum(kept[i].supervised for i in indices)
        )
    del rows
    all_rows.unlink()
    account.check()
    account.save(folder)


def _conversations(source: Path, account: RowAccount, policy: TurnPolicy) -> Iterator[Conversation]:
    first_with: dict[str, int] = {}
    for row in _limited(source, account):
        account.num_rows += 1
        try:
            if row.error is not None:
                raise row.error
            messages, changes = normalise_turns(parse_turns(row.value), policy)
            digest = text_sha256(json.dumps(messages))
            earlier = first_with.setdefault(digest, row.number)
            if earlier != row.number and policy.duplicates == "drop":
                raise RowError("duplicate", f"the same as row {earlier}")
        except RowError as error:
            account.drop(row.number, row.line, error)
            continue
        source_id = row.value.get("id")
        yield Conversation(row.number, row.line, "" if source_id is None else str(source_id), messages, changes, digest)


def _limited(source: Path, account: RowAccount) -> Iterator[SourceRow]:
    return islice(read_rows(source), account.settings["limit"])


def _record(conversation: Conversation, row: Row) -> dict[str, Any]:
    first_reply = next(i for i, message in enumerate(conversation.messages) if message["role"] == "assistant")
    return {
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask,
        "source_row": conversation.number,
        "source_id": conversation.source_id,
        "prompt": conversation.messages[:first_reply],
    }


def _nothing_left(account: RowAccount) -> str:
    reasons = "; ".join(f"{len(entry.rows)} {reason} ({entry.example})" for reason, entry in account.dropped.items())
    return f"no row of {account.source} can be used: {reasons or 'it has none'}"
