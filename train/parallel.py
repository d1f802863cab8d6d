"""Rows built in worker processes, in order."""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext
from multiprocessing.pool import Pool
from typing import Protocol, TypeVar

import torch

from draftwood.train.conversations import RowError
from draftwood.train.rows import Row, RowBuilder
from draftwood.train.turns import Message

CHUNK = 16
WINDOW = 2048  # items in flight; the pool would otherwise read the whole source ahead


class HasMessages(Protocol):
    @property
    def messages(self) -> list[Message]: ...


Item = TypeVar("Item", bound=HasMessages)
_worker_build: RowBuilder | None = None


def map_rows(build: RowBuilder, items: Iterable[Item], num_proc: int) -> Iterator[tuple[Item, Row | RowError]]:
    """Each item with its row, or with the error that says why it has none, in the order of `items`."""
    if num_proc < 1:
        raise ValueError(f"num_proc is {num_proc}, expected at least 1")
    if num_proc == 1:
        for item in items:
            yield item, _attempt(build, item.messages)
        return
    # Not forked: a target that has run leaves OpenMP threads behind, and a forked child waits for them for ever.
    context = multiprocessing.get_context("spawn")
    remaining = iter(items)
    with _single_threaded_tokenizers(), _started_without_ctrl_c(context, num_proc, build) as pool:
        while window := list(islice(remaining, WINDOW)):
            outcomes = pool.imap(_attempt_in_worker, [item.messages for item in window], chunksize=CHUNK)
            yield from zip(window, outcomes, strict=True)


def _started_without_ctrl_c(context: SpawnContext, num_proc: int, build: RowBuilder) -> Pool:
    """Workers inherit the blocked signal: a Ctrl-C is for the parent alone, which then ends them."""
    resource_tracker.ensure_running()  # it unblocks the signal once it has started, which the first worker would do
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return context.Pool(num_proc, _start_worker, (build,))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(build: RowBuilder) -> None:
    global _worker_build
    torch.set_num_threads(1)
    _worker_build = build


def _attempt_in_worker(messages: list[Message]) -> Row | RowError:
    assert _worker_build is not None
    return _attempt(_worker_build, messages)


def _attempt(build: RowBuilder, messages: list[Message]) -> Row | RowError:
    try:
        return build(messages)
    except RowError as error:
        return error


@contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """One thread per worker; saying so also keeps the tokenizers library from warning about the fork."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
