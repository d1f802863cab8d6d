import json
import sys
from dataclasses import replace

import pytest
import torch

from draftwood import cli
from draftwood.kernels.distill_loss import (
    DistillHead,
    DistillWeights,
    distill_loss,
    distill_loss_reference,
    teacher_statistics,
)
from draftwood.models.memory import peak_memory
from draftwood.train import benchmark
from draftwood.train.benchmark import SHAPES, benchmark_distill

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
SETTINGS = {"precision": None, "batch_size": 2, "length": 24, "repeats": 1}


@pytest.fixture(scope="module")
def result():
    return benchmark_distill(TINY, align=(1, 3), **SETTINGS)


def by_key(result):
    return {(row.source, row.align): row for row in result.rows}


def test_every_source_has_every_number_of_align_steps(result):
    rows = by_key(result)
    assert len(result.rows) == len(rows) == 6
    assert set(rows) == {(source, n) for source in ("none", "cached", "online") for n in (1, 3)}
    assert all(row.rows_per_s > 0 and row.peak_mib > 0 and row.flops_per_row > 0 for row in result.rows)


def test_ratios_are_against_align_1_of_the_same_source(result):
    rows = by_key(result)
    for (source, align), row in rows.items():
        base = rows[source, 1]
        assert row.ratio_time == pytest.approx(base.rows_per_s / row.rows_per_s)
        assert row.ratio_memory == pytest.approx(row.peak_mib / base.peak_mib)
        assert align != 1 or (row.ratio_time == row.ratio_memory == 1)


def test_operations_are_those_of_the_matrix_products(result):
    rows, hidden, t = by_key(result), TINY.hidden_size, SETTINGS["length"]
    kv = hidden * TINY.num_key_value_heads // TINY.num_attention_heads
    projections = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * TINY.intermediate_size
    linear = 2 * (2 * hidden * hidden + projections)
    logits = 2 * hidden * TINY.vocab_size
    # A product's two gradients cost as much each as itself; the head has no gradient, and logits come twice for the
    # target (its logits and its pull) and twice for each align step, beside the ten tokens of the Top-K term.
    attention = 2 * 2 * t * hidden
    topk = 2 * 10 * hidden
    # The fusion layer's input comes from norms with weights, so it has both gradients as well.
    one = 3 * (linear + attention) + 4 * logits + topk
    assert rows["none", 1].flops_per_row == pytest.approx(one, rel=0.001)
    # Each later step attends to one column less in its block, and to its diagonals without a matrix product; all of it
    # is computed again in the backward pass.
    columns = [2 * 2 * (t - earlier) * hidden for earlier in (1, 2)]
    more = sum(4 * (linear + attention) + 2 * logits for attention in columns)
    assert rows["none", 3].flops_per_row == pytest.approx(one + more, rel=0.001)
    assert rows["cached", 1].flops_per_row == rows["none", 1].flops_per_row
    target = TINY.num_layers * (2 * projections + 2 * 2 * (t + 2) * hidden) + logits
    online = rows["online", 1].flops_per_row - rows["none", 1].flops_per_row
    assert online == pytest.approx(target * (t + 2) / t, rel=0.001)


def test_three_align_steps_need_little_more_memory_where_the_vocabulary_dominates():
    shape = replace(TINY, vocab_size=16384)
    rows = by_key(benchmark_distill(shape, align=(1, 3), sources=("none",), rows_per_chunk=32, **SETTINGS))
    assert rows["none", 1].peak_mib > 32 * shape.vocab_size * 4 / 2**20
    assert 1 <= rows["none", 3].ratio_memory <= 1.15


def test_memory_of_a_step_stays_below_its_logits_when_they_are_chunked():
    shape = replace(TINY, vocab_size=16384)
    chunked = benchmark_distill(shape, align=(1, 3), sources=("none",), rows_per_chunk=4, **SETTINGS)
    logits_mib = SETTINGS["batch_size"] * SETTINGS["length"] * shape.vocab_size * 4 / 2**20
    assert by_key(chunked)["none", 3].peak_mib < logits_mib


def test_memory_of_the_loss_does_not_grow_with_the_vocabulary(monkeypatch):
    monkeypatch.setattr("draftwood.kernels.distill_loss.CHUNK_ELEMENTS", 2**21)
    draw = torch.Generator().manual_seed(0)

    def peak_of(vocab, rows_per_chunk=None):
        head = DistillHead.build(torch.randn(vocab, 8, generator=draw))
        features = torch.randn(128, 8, generator=draw)
        outputs = [torch.randn(128, 8, generator=draw, requires_grad=True) for _ in range(2)]
        with peak_memory(CPU) as peak:
            statistics = teacher_statistics(features, head, rows_per_chunk)
            distill_loss(outputs, features, head, DistillWeights(), 1, statistics, rows_per_chunk).loss.backward()
        return peak[0]

    assert peak_of(65536) == pytest.approx(peak_of(8192), rel=0.05)
    assert peak_of(65536, rows_per_chunk=256) > 4 * peak_of(8192)


def test_memory_of_the_loss_does_not_grow_with_the_rows_beyond_a_chunk():
    hidden, vocab, chunk, steps = 8, 4096, 16, 3
    draw = torch.Generator().manual_seed(0)
    head = DistillHead.build(torch.randn(vocab, hidden, generator=draw))

    def peak_of(rows, loss_of):
        features = torch.randn(rows, hidden, generator=draw)
        outputs = [torch.randn(rows, hidden, generator=draw, requires_grad=True) for _ in range(steps)]
        with peak_memory(CPU) as peak:
            loss_of(outputs, features).backward()
        return peak[0]

    def chunked(outputs, features):
        return distill_loss(outputs, features, head, DistillWeights(), 1, rows_per_chunk=chunk).loss

    def whole(outputs, features):
        return distill_loss_reference(outputs, features, head, DistillWeights(), 1)

    growth = peak_of(4 * chunk, chunked) - peak_of(chunk, chunked)
    # The gradients of the outputs, twice where backward scales them, and the ranks: nothing that knows the vocabulary.
    assert growth <= 3 * chunk * steps * (2 * hidden * 4 + 8)
    assert peak_of(4 * chunk, whole) - peak_of(chunk, whole) > 3 * chunk * vocab * 4


def test_batches_of_all_sources_agree(tmp_path):
    target = benchmark.random_target(TINY, torch.float32, CPU, 26)
    makers = benchmark._batch_makers(target, benchmark.SOURCES, None, 2, 24, tmp_path)
    none, cached, online = (makers[name]() for name in ("none", "cached", "online"))
    torch.testing.assert_close(online.features, none.features)
    torch.testing.assert_close(cached.features, none.features, rtol=2**-8, atol=1e-6)
    assert makers["none"]() is none and makers["online"]() is not online
    for batch in (none, cached, online):
        assert batch.features.shape == (2, 26, TINY.hidden_size) and int(batch.supervised.sum()) == 48


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"align": (2, 3)}, r"align is \[2, 3\]"),
        ({"align": (0, 1)}, r"align is \[0, 1\]"),
        ({"sources": ("none", "disk")}, "sources disk; expected some of none, cached, online"),
        ({"length": 0}, "length is 0"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        benchmark_distill(TINY, **settings)


def test_the_command_prints_a_table_and_writes_its_rows(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["draftwood", "benchmark", "distill", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    file = tmp_path / "distill.json"
    small = ("--shape", "tiny", "--length", "8", "--repeats", "1", "--align", "1,2", "--json", str(file))
    code, out, _ = run(*small, "--device", "cpu")
    assert code == 0 and "rows/s" in out and "online" in out
    rows = json.loads(file.read_text())["rows"]
    fields = {"align", "source", "rows_per_s", "peak_mib", "ratio_time", "ratio_memory", "flops_per_row"}
    assert len(rows) == 6 and all(set(row) == fields for row in rows)
    assert "whole numbers" in run("--align", "1,x")[2] and run("--align", "1,2.5")[0] == 2
    assert run("--sources", "disk")[0] == 2 and run("--repeats", "0")[0] == 2
    assert run("--dtype", "float16")[0] == 2 and run("--shape", "huge")[0] == 2
