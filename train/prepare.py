"""From conversations to Arrow folders of training rows, with an account of every row.

    account = prepare("sharegpt.json", tokenizer, "runs/data", max_length=2048, num_validation=200, seed=0)
    account = prepare(["sharegpt:0.5", "more.parquet"], tokenizer, ...)      # half of the one, all of the other
    train = load_rows("runs/data", "train")      # input_ids, loss_mask, source, source_row, source_id, prompt

Prepare before the process group of a distributed run exists, or the other ranks time out while they wait; a second call
with the same settings finds the finished folder.
"""

import json
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, Features, List, Value, load_from_disk
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import from_numpy
from transformers import PreTrainedTokenizerBase

from draftwood.models.fingerprint import tokenizer_settings
from draftwood.train.conversations import RowError, SourceRow, parse_turns
from draftwood.train.fingerprint import text_sha256
from draftwood.train.parallel import map_rows
from draftwood.train.report import ACCOUNT_FILE, Histogram, RowAccount, SourceAccount, SplitCount
from draftwood.train.report_page import write_page
from draftwood.train.rows import Row, RowBuilder, supervised_rows
from draftwood.train.sources import Source, SourceLike, copies, open_sources
from draftwood.train.split import choose_validation, rank
from draftwood.train.turns import Message, TurnPolicy, normalise_turns

SPLITS = ("train", "validation")
FORMAT = 1  # raise it when the same settings would give other rows
FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
        "source": Value("string"),
        "source_row": Value("int64"),
        "source_id": Value("string"),
        "prompt": List({"role": Value("string"), "content": Value("string")}),
    }
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversation:
    """A row of a source that got through the turn policy. `digest`: of its messages. `copies`: how often it is used."""

    source: SourceAccount
    number: int
    line: int | None
    source_id: str
    messages: list[Message]
    changes: Counter[str]
    digest: str
    copies: int


@dataclass(frozen=True)
class _Kept:
    source: SourceAccount
    source_id: str
    digest: str
    copies: int
    tokens: int
    supervised: int
    replies: int


def prepare(
    source: SourceLike | Sequence[SourceLike],
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    *,
    max_length: int,
    num_validation: int,
    min_length: int = 0,
    long_rows: Literal["clip", "drop"] = "clip",
    seed: int = 0,
    parts_by_id: bool = True,
    policy: TurnPolicy | None = None,
    template_options: Mapping[str, Any] | None = None,
    limit: int | None = None,
    num_proc: int = 1,
    overwrite: bool = False,
    console: Console | None = None,
) -> RowAccount:
    """Write `train` and `validation` rows, `account.json` and `report.html` into `out_dir`, or reuse them.

    The folder appears when it is whole. The split goes by a hash of the conversation and `seed`: it does not depend on
    the order of the file, and conversations that are equal or parts of one (`split.py`) are on one side. Training rows
    of several sources are mixed, in the order of that hash. A conversation that an earlier row or source has word for
    word is dropped.

    Args:
        source: one or several, see `sources.py`. A weight of 0.3 uses 30 % of the source's conversations, chosen by
            hash; 2.3 uses each twice in training and 30 % of them a third time.
        max_length: tokens per row at most; `long_rows` says what becomes of longer ones.
        num_validation: conversations held out, exactly; none of them is repeated.
        min_length: rows of fewer tokens are dropped.
        parts_by_id: rows whose ids are `<7 letters or digits>_<number>` with one stem are parts of one conversation.
        limit: only the first so many entries of each source.
        num_proc: processes that render and tokenise.
        overwrite: replace a folder that was prepared with other settings.
        console: for progress; None is stderr.

    Raises:
        ValueError: a source is no such file, no row is left, fewer rows than `num_validation` + 1, or `out_dir` holds
            other data (the message says which settings differ).
    """
    sources = open_sources(source)
    out_dir = Path(out_dir).absolute()
    policy = policy or TurnPolicy()
    build = RowBuilder(
        tokenizer,
        max_length=max_length,
        min_length=min_length,
        long_rows=long_rows,
        policy=policy,
        template_options=template_options,
    )
    settings = {
        "format": FORMAT,
        "source_sha256": _sources_sha256(sources),
        **tokenizer_settings(tokenizer),
        "template_options": dict(template_options or {}),
        "max_length": max_length,
        "num_validation": num_validation,
        "seed": seed,
        "parts_by_id": parts_by_id,
        "limit": limit,
        "policy": {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(policy).items()},
        # Left out at their defaults, so that folders of before they existed stay good.
        **({"min_length": min_length} if min_length else {}),
        **({"long_rows": long_rows} if long_rows != "clip" else {}),
    }
    account = RowAccount(
        [SourceAccount(source.name, source.weight) for source in sources],
        settings=settings,
        fingerprint=text_sha256(json.dumps(settings, sort_keys=True)),
    )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out_dir.parent / f".{out_dir.name}.lock"):
        if finished := _find_finished(out_dir, account, overwrite):
            logger.info("rows in %s are reused", out_dir)
            return finished
        for leftover in out_dir.parent.glob(f".{out_dir.name}-partial-*"):  # of a run that was killed
            shutil.rmtree(leftover)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-partial-", dir=out_dir.parent))
        try:
            _write(sources, build, scratch, account, num_proc, console or Console(stderr=True))
            write_page(scratch, account, load_rows(scratch, "train"), tokenizer)
            if out_dir.exists():
                shutil.rmtree(out_dir)
            scratch.chmod(0o755)
            scratch.rename(out_dir)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return account


def load_rows(out_dir: str | Path, split: str) -> Dataset:
    """A split written by `prepare`: input_ids [T] and loss_mask [T] lists; source, source_row and source_id say where
    the conversation is from; prompt is its messages before the first reply.

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
    keys = [*wanted.settings, *(key for key in found.settings if key not in wanted.settings)]
    differing = [key for key in keys if wanted.settings.get(key) != found.settings.get(key)]
    raise ValueError(
        f"{out_dir} was prepared with another {', '.join(differing)}: choose another folder, or replace it with "
        "--overwrite (in Python overwrite=True)"
    )


def _write(
    sources: list[Source], build: RowBuilder, folder: Path, account: RowAccount, num_proc: int, console: Console
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    all_rows = folder / "all.arrow"
    kept: list[_Kept] = []
    with Progress(*columns, console=console, transient=True) as progress:
        # Reading is a hundred times faster than tokenising, so counting first costs little and the bar knows its end.
        total = sum(1 for source in sources for _ in _limited(source, account))
        task = progress.add_task("Tokenising conversations", total=total)
        with ArrowWriter(path=str(all_rows), features=FEATURES) as writer:
            for conversation, outcome in map_rows(build, _conversations(sources, account, build.policy), num_proc):
                source = conversation.source
                before = sum(one.num_rows for one in account.sources[: account.sources.index(source)])
                progress.update(task, completed=before + conversation.number)
                if isinstance(outcome, RowError):
                    source.drop(conversation.number, conversation.line, outcome)
                    continue
                source.change(conversation.number, conversation.changes + outcome.changes)
                account.max_token_id = max(account.max_token_id, int(outcome.input_ids.max()))
                kept.append(_kept(conversation, outcome))
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
    chosen = {"train": _training_order(kept, validation, account), "validation": sorted(validation)}
    for split in SPLITS:
        rows.select(chosen[split]).save_to_disk(str(folder / split))
        _count(split, [kept[i] for i in chosen[split]], account)
    for name in ("tokens", "supervised", "replies"):
        account.histograms[name] = Histogram.of([getattr(kept[i], name) for i in chosen["train"]])
    del rows
    all_rows.unlink()
    account.check()
    account.save(folder)


def _training_order(kept: list[_Kept], validation: set[int], account: RowAccount) -> list[int]:
    """Indices of the training rows, repeated as their weights ask for; those of several sources mixed."""
    indices = [i for i in range(len(kept)) if i not in validation]
    if len(account.sources) > 1:
        indices.sort(key=lambda i: rank(account.settings["seed"], kept[i].digest))
    rounds = max((kept[i].copies for i in indices), default=0)
    return [i for done in range(rounds) for i in indices if kept[i].copies > done]


def _count(split: str, rows: list[_Kept], account: RowAccount) -> None:
    for source in account.sources:
        own = [row for row in rows if row.source is source]
        source.splits[split] = SplitCount(
            len(own),
            sum(row.tokens for row in own),
            sum(row.supervised for row in own),
            len(own) - len(set(map(id, own))),
        )


def _conversations(sources: list[Source], account: RowAccount, policy: TurnPolicy) -> Iterator[Conversation]:
    first_with: dict[str, tuple[SourceAccount, int]] = {}
    for source, own in zip(sources, account.sources, strict=True):
        for row in _limited(source, account):
            own.num_rows += 1
            try:
                if row.error is not None:
                    raise row.error
                messages, changes = normalise_turns(parse_turns(row.value), policy)
                digest = text_sha256(json.dumps(messages))
                times = copies(digest, own.weight, account.settings["seed"])
                if not times:
                    raise RowError("not_sampled", f"the weight of {own.name} is {own.weight:g}")
                earlier = first_with.setdefault(digest, (own, row.number))
                if earlier != (own, row.number) and policy.duplicates == "drop":
                    where = "" if earlier[0] is own else f" of {earlier[0].name}"
                    raise RowError("duplicate", f"the same as row {earlier[1]}{where}")
            except RowError as error:
                own.drop(row.number, row.line, error)
                continue
            yield Conversation(own, row.number, row.line, row.source_id, messages, changes, digest, times)


def _limited(source: Source, account: RowAccount) -> Iterator[SourceRow]:
    return islice(source.rows(), account.settings["limit"])


def _kept(conversation: Conversation, row: Row) -> _Kept:
    mask = row.loss_mask
    return _Kept(
        conversation.source,
        conversation.source_id,
        conversation.digest,
        conversation.copies,
        tokens=len(mask),
        supervised=int(supervised_rows(from_numpy(mask)).sum()),
        replies=int(mask[0]) + int((mask[1:] & ~mask[:-1]).sum()),
    )


def _record(conversation: Conversation, row: Row) -> dict[str, Any]:
    first_reply = next(i for i, message in enumerate(conversation.messages) if message["role"] == "assistant")
    return {
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask,
        "source": conversation.source.name,
        "source_row": conversation.number,
        "source_id": conversation.source_id,
        "prompt": conversation.messages[:first_reply],
    }


def _sources_sha256(sources: list[Source]) -> str:
    """Of the one source's content; of several, or with weights, of all contents and weights in order."""
    digests = [source.sha256() for source in sources]
    if len(sources) == 1 and sources[0].weight == 1:
        return digests[0]
    return text_sha256(json.dumps([[digest, source.weight] for digest, source in zip(digests, sources, strict=True)]))


def _nothing_left(account: RowAccount) -> str:
    parts = []
    for source in account.sources:
        reasons = "; ".join(f"{len(entry.rows)} {reason} ({entry.example})" for reason, entry in source.dropped.items())
        parts.append(f"no row of {source.name} can be used: {reasons or 'it has none'}")
    return "; ".join(parts)
