"""What a training step costs as align steps are added, with and without the work of getting the features.

A random Llama target gives head, embeddings and features; every row of the draft is supervised. All numbers of align
steps and all feature sources take turns within one run, and are reported as medians.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from draftwood.configs.schema import OptimizerConfig
from draftwood.decode.benchmark_record import BenchmarkRecord, machine, random_model
from draftwood.kernels.distill_loss import DistillHead, DistillWeights, chunk_rows
from draftwood.models.draft import EagleDraft
from draftwood.models.memory import peak_memory
from draftwood.models.target import Target
from draftwood.models.timing import elapsed_ms
from draftwood.train.batches import Batch, RowSizes, collate
from draftwood.train.compiled import check_compiler
from draftwood.train.features import FeatureSource, open_cache
from draftwood.train.losses import Distillation
from draftwood.train.optim import Optimizers

SOURCES = ("none", "cached", "online")
PRECISIONS = {"bf16": torch.bfloat16, "float32": None}
# The last tokens of a row have nothing to predict: a draft with T rows reads T + 2 tokens.
_TOKENS_BEYOND = 2


@dataclass(frozen=True)
class Shape:
    """A Llama target with random weights; the draft takes the shape of one of its layers and its whole vocabulary."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


# The first is SmolLM2-135M's.
SHAPES = {
    "smollm2": Shape(576, 30, 1536, 9, 3, 49152),
    "tiny": Shape(32, 2, 48, 4, 2, 97),
}


@dataclass(frozen=True)
class Row:
    """One number of align steps with one feature source: supervised rows trained per second, the peak of tensor bytes
    above the resting state, both against align 1 of the same source, and operations of matrix products per row."""

    align: int
    source: str
    rows_per_s: float
    peak_mib: float
    ratio_time: float
    ratio_memory: float
    flops_per_row: float


@dataclass(frozen=True)
class DistillBenchmark(BenchmarkRecord[Row]):
    def table(self) -> Table:
        table = Table("align", "features", "rows/s", "time", "peak MiB", "memory", "MFLOP/row")
        for row in self.rows:
            time, memory = f"{row.ratio_time:.2f}x", f"{row.ratio_memory:.2f}x"
            speed, peak, flops = f"{row.rows_per_s:,.0f}", f"{row.peak_mib:,.1f}", f"{row.flops_per_row / 1e6:,.1f}"
            table.add_row(str(row.align), row.source, speed, time, peak, memory, flops)
        return table


def benchmark_distill(
    shape: Shape,
    *,
    align: Sequence[int] = (1, 2, 3, 4, 5),
    sources: Sequence[str] = SOURCES,
    precision: torch.dtype | None = torch.bfloat16,
    batch_size: int = 2,
    length: int = 512,
    rows_per_chunk: int | None = None,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    compiled: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> DistillBenchmark:
    """Times a training step (features, align forward, loss, backward, AdamW) at every number of align steps.

    Args:
        align: numbers of align steps; 1 is what the ratios are against.
        sources: `none`: a batch made beforehand; `cached`: read from files and collated in each step; `online`: a
            forward of the target and its statistics in each step, and collated.
        precision: what the draft is autocast to, and the dtype of target and head; None is float32.
        length: rows of the draft in each of the `batch_size` sequences, all supervised.
        rows_per_chunk: as in `distill_loss`.
        repeats: timed rounds; in each, every combination runs once.
        compiled: the time is that of a step with `loop.compile`; memory and operations are counted without.

    Raises:
        ValueError: an `align` without 1 or below it, an unknown source, a size below 1, or `compiled` without a
            compiler.
    """
    if 1 not in align or min(align) < 1:
        raise ValueError(f"align is {list(align)}; expected numbers from 1 on, with 1, which the ratios are against")
    if unknown := set(sources) - set(SOURCES):
        raise ValueError(f"sources {', '.join(sorted(unknown))}; expected some of {', '.join(SOURCES)}")
    for name, size in (("batch", batch_size), ("length", length), ("repeats", repeats)):
        if size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")
    device = torch.device(device)
    if compiled:
        check_compiler(device)
    on_progress("building the target")
    target = random_target(shape, precision or torch.float32, device, length + _TOKENS_BEYOND)
    with TemporaryDirectory() as folder:
        batches = _batch_makers(target, sources, precision, batch_size, length, Path(folder), compiled)
        training = _Training(target, precision, rows_per_chunk, batch_size * length, compiled)
        keys = [(source, n) for source in batches for n in align]
        times: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
        for i, (source, n) in enumerate(keys):
            on_progress(f"warm-up: {i + 1} of {len(keys)}")
            training.step(batches[source], n)
        for round_ in range(repeats):
            on_progress(f"round {round_ + 1} of {repeats}")
            for source, n in keys:
                times[source, n].append(elapsed_ms(device, partial(training.step, batches[source], n)))
        on_progress("memory and operations")
        if compiled:  # whose allocations and products are not seen: counted without
            batches = _batch_makers(target, sources, precision, batch_size, length, Path(folder))
            training = _Training(target, precision, rows_per_chunk, batch_size * length)
        peaks = {(source, n): training.peak_bytes(batches[source], n) for source, n in keys}
        flops = {(source, n): training.flops(batches[source], n) for source, n in keys}
    num_rows = batch_size * length
    rows = []
    for source, n in keys:
        ms, base = median(times[source, n]), median(times[source, 1])
        ratio_memory = peaks[source, n] / peaks[source, 1]
        peak_mib, flops_per_row = peaks[source, n] / 2**20, flops[source, n] / num_rows
        rows.append(Row(n, source, 1e3 * num_rows / ms, peak_mib, ms / base, ratio_memory, flops_per_row))
    settings = {
        "shape": asdict(shape),
        "dtype": "float32" if precision is None else f"{str(precision).removeprefix('torch.')} autocast",
        "batch": batch_size,
        "length": length,
        "rows_per_chunk": rows_per_chunk or chunk_rows(shape.vocab_size),
        "repeats": repeats,
        "compiled": compiled,
        **machine(device),
    }
    return DistillBenchmark(settings, rows)


def random_target(shape: Shape, dtype: torch.dtype, device: torch.device, length: int, seed: int = 0) -> Target:
    """A Llama model of this shape with random weights, for `length` tokens at least."""
    return random_model(
        "llama",
        dtype,
        device,
        seed,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=max(2048, length),
    )


class _Training:
    """A draft and its optimizer, shared by all combinations: what a step costs does not depend on the weights."""

    def __init__(
        self,
        target: Target,
        precision: torch.dtype | None,
        rows_per_chunk: int | None,
        num_rows: int,
        compiled: bool = False,
    ):
        torch.manual_seed(0)
        draft = EagleDraft.from_target(target).train()
        head = DistillHead.build(target.head_weight, None, target.logit_scale, precision)
        self.module = Distillation(draft, head, DistillWeights(), 1, rows_per_chunk, precision, compiled)
        self.optimizers = Optimizers(draft, OptimizerConfig(schedule="constant", warmup_ratio=0.0), total_steps=1)
        self.device, self.num_rows = target.device, num_rows

    def step(self, make_batch: Callable[[], Batch], align: int) -> None:
        self.module(make_batch(), self.num_rows, steps=align).loss.backward()
        self.optimizers.step(0)

    def peak_bytes(self, make_batch: Callable[[], Batch], align: int) -> int:
        with peak_memory(self.device) as peak:
            self.step(make_batch, align)
        return peak[0]

    def flops(self, make_batch: Callable[[], Batch], align: int) -> int:
        with FlopCounterMode(display=False, custom_mapping=_ATTENTION_FLOPS) as counter:
            self.step(make_batch, align)
        return counter.get_total_flops()


def _batch_makers(
    target: Target,
    sources: Sequence[str],
    precision: torch.dtype | None,
    batch_size: int,
    length: int,
    folder: Path,
    compiled: bool = False,
) -> dict[str, Callable[[], Batch]]:
    """For each source, what gives a step its batch; `folder` holds the cached features."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(3, target.vocab_size, (batch_size, length + _TOKENS_BEYOND))
    rows = [{"input_ids": ids, "loss_mask": np.ones(len(ids), bool)} for ids in tokens]
    numbers = list(range(batch_size))
    head = DistillHead.build(target.head_weight, None, target.logit_scale, precision)
    online = FeatureSource(target, rows, head, precision, compiled=compiled)

    def collated(source: FeatureSource) -> Batch:
        return collate(numbers, rows, source(numbers), target.hidden_dim, target.device)

    ready = collated(online)
    assert int(ready.supervised.sum()) == batch_size * length
    makers: dict[str, Callable[[], Batch]] = {}
    for name in sources:
        if name == "none":
            makers[name] = lambda: ready
        elif name == "online":
            makers[name] = partial(collated, online)
        else:
            cache = open_cache(folder, target, RowSizes.of(rows), precision, float("inf"), rebuild=False)
            cache.fill(online, tokens.size)
            makers[name] = partial(collated, FeatureSource(target, rows, head, precision, cache))
    return makers


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Both products of an attention over shapes [B, Hq, T, Dh] and [B, Hkv, T, Dh], masked columns included."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (width + value[3])


# torch's own formulas leave out the CPU's attention, and key/value heads that several query heads share.
_ATTENTION_FLOPS = {
    operator: _attention_flops
    for operator in (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
    )
}
