"""Which rows make up a batch, and the batch itself.

A row is one conversation, and rows of similar length share a batch: padding costs a few percent, no conversation can
see another, and every family of targets and drafts does it. Packing several into one row would need state resets in
every convolution and scan of the target, which transformers has for some families only.

The rows of an optimizer step, its *global batch*, depend on (seed, epoch) and its size alone, not on how many processes
share it: two processes with 4 rows each see what one process with 8 sees.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from draftwood.kernels.distill_loss import TeacherStatistics
from draftwood.train.rows import supervised_rows

# Global batches among which rows are sorted by length: padding shrinks, and the order stays random on the whole.
_SORTED_TOGETHER = 32
_READ_TOGETHER = 256
# A row shorter than this predicts nothing.
_MIN_LENGTH = 3


class Rows(Protocol):
    """Prepared conversations: each a mapping with `input_ids` [T] int and `loss_mask` [T] bool, true on the replies."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


def each_row(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids [T] int64 and mask [T] bool of every row, in order; of a `Dataset` many at a time, ten times as fast."""
    if not isinstance(rows, Dataset):
        yield from (_ids_and_mask(rows[i]) for i in range(len(rows)))
        return
    for batch in rows.iter(_READ_TOGETHER):
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
            yield _ids_and_mask({"input_ids": ids, "loss_mask": mask})


@dataclass(frozen=True)
class RowSizes:
    """Of every row its `lengths` and number of `supervised` rows, both [N] int64; `digest` names the token ids."""

    lengths: np.ndarray
    supervised: np.ndarray
    digest: str

    @classmethod
    def of(cls, rows: Rows) -> "RowSizes":
        digest, lengths, supervised = sha256(), [], []
        for ids, mask in each_row(rows):
            digest.update(len(ids).to_bytes(8, "little") + ids.numpy().astype("<i4").tobytes())
            lengths.append(len(ids))
            supervised.append(int(supervised_rows(mask).sum()))
        return cls(np.array(lengths, np.int64), np.array(supervised, np.int64), digest.hexdigest())


def check_draft_vocab_size(size: int, vocab_size: int) -> None:
    """Raises:
    ValueError: `size` is not below `vocab_size`.
    """
    if size >= vocab_size:
        raise ValueError(f"draft.draft_vocab_size is {size}, the target has {vocab_size} tokens; leave it out for all")


def frequent_tokens(rows: Rows, size: int, vocab_size: int) -> Tensor:
    """The `size` tokens most often seen in replies, [size] int64 ascending: a reduced draft vocabulary.

    Raises:
        ValueError: as `check_draft_vocab_size`.
    """
    check_draft_vocab_size(size, vocab_size)
    counts = _reply_counts(rows, vocab_size)
    return torch.sort(-counts, stable=True).indices[:size].sort().values


def vocab_coverage(rows: Rows, draft_vocab: Tensor, vocab_size: int) -> float:
    """The share of the reply tokens of `rows` that are in `draft_vocab` [Vd] int64, from 0 to 1."""
    counts = _reply_counts(rows, vocab_size)
    return int(counts[draft_vocab.cpu()].sum()) / max(1, int(counts.sum()))


def _reply_counts(rows: Rows, vocab_size: int) -> Tensor:
    """How often each token is in a reply, [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids, mask in each_row(rows):
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    return counts


def global_batches(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The row numbers of each optimizer step of an epoch, in order; rows of one batch have similar lengths.

    Every row comes once; the last rows of the shuffle may make a smaller batch.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), batch_size * _SORTED_TOGETHER):
        pool = order[start : start + batch_size * _SORTED_TOGETHER]
        pool = pool[np.argsort(-lengths[pool], kind="stable")]
        batches += [pool[i : i + batch_size].tolist() for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in random.permutation(len(batches))]


def micro_batches(
    global_batch: Sequence[int], batch_size: int, num_processes: int = 1, process_index: int = 0
) -> list[list[int]]:
    """This process's share of a global batch, at most `batch_size` rows per micro-step.

    All processes get the same number of micro-steps, of rows of similar length; where rows run out a share is empty.
    """
    step = batch_size * num_processes
    return [
        list(global_batch[start : start + step][process_index::num_processes])
        for start in range(0, len(global_batch), step)
    ]


def padding_share(lengths: np.ndarray, batch_size: int, num_processes: int, accumulation: int, seed: int) -> float:
    """How much of what is computed in the first epoch is padding, from 0 to 1: of micro-batches, on all processes."""
    padded = 0
    for global_batch in global_batches(lengths, batch_size * num_processes * accumulation, seed, epoch=0):
        shares = [micro_batches(global_batch, batch_size, num_processes, rank) for rank in range(num_processes)]
        padded += sum(len(micro) * int(lengths[micro].max()) for share in shares for micro in share if micro)
    return 1 - int(lengths.sum()) / max(1, padded)


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right; B of them, the longest of T tokens.

    Attributes:
        rows: their numbers; empty where this process has none and takes part with a row that trains nothing.
        tokens: [B, T] int64. lengths: real tokens of each.
        features: [B, T, H] float32 of the target, zero on padding.
        statistics: of the features, [B, T] each.
        supervised: [B, T] bool, rows of the draft that are trained.
    """

    rows: list[int]
    tokens: Tensor
    lengths: list[int]
    features: Tensor
    statistics: TeacherStatistics
    supervised: Tensor


def collate(
    numbers: list[int],
    rows: Rows,
    features: Sequence[tuple[Tensor, TeacherStatistics]],
    hidden_dim: int,
    device: torch.device,
) -> Batch:
    """Pads rows `numbers` and their `features` ([T, H] and statistics [T] of each) into one batch on `device`."""
    pairs = [_ids_and_mask(rows[i]) for i in numbers]
    lengths = [len(ids) for ids, _ in pairs]
    shape = (max(1, len(numbers)), max([_MIN_LENGTH, *lengths]))
    tokens = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    padded = torch.zeros(*shape, hidden_dim, device=device)
    normaliser = torch.zeros(shape, device=device)
    argmax = torch.zeros(shape, dtype=torch.int64, device=device)
    for b, ((ids, replies), (feature, statistics)) in enumerate(zip(pairs, features, strict=True)):
        n = len(ids)
        tokens[b, :n], mask[b, :n] = ids, replies
        padded[b, :n], normaliser[b, :n], argmax[b, :n] = feature, statistics.normaliser, statistics.argmax
    return Batch(
        list(numbers),
        tokens.to(device),
        lengths,
        padded,
        TeacherStatistics(normaliser, argmax),
        supervised_rows(mask).to(device),
    )


def add_noise(batch: Batch, amount: float, seed: int, epoch: int) -> Tensor:
    """Features with uniform noise of width `amount * 512 / T` (EAGLE's), [B, T, H].

    T is a row's own length and the noise depends on (seed, epoch, row) alone, so that neither padding nor the way a
    batch is split changes it.
    """
    if not amount or not batch.rows:
        return batch.features
    noisy = batch.features.clone()
    for b, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
        state = np.random.SeedSequence([seed, epoch, row]).generate_state(1, np.uint64)
        generator = torch.Generator(noisy.device).manual_seed(int(state[0] >> np.uint64(1)))
        noise = torch.rand(length, noisy.shape[-1], generator=generator, device=noisy.device)
        noisy[b, :length] += (noise - 0.5) * (amount * 512 / length)
    return noisy


def _ids_and_mask(row: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    ids = torch.as_tensor(np.asarray(row["input_ids"], dtype=np.int64))
    mask = torch.as_tensor(np.asarray(row["loss_mask"], dtype=bool))
    if ids.shape != mask.shape:
        raise ValueError(f"a row has {len(ids)} input_ids and {len(mask)} loss_mask entries; prepare the data anew")
    return ids, mask
