import json
import logging

import numpy as np
import pytest
import tiny
import torch

from draftwood.kernels.distill_loss import DistillHead
from draftwood.models.target import load_target
from draftwood.train import features
from draftwood.train.batches import RowSizes
from draftwood.train.features import FeatureError, FeatureSource, open_cache


@pytest.fixture(scope="module")
def target():
    return load_target(tiny.build("bamba"))


@pytest.fixture
def rows():
    draw = np.random.default_rng(0)
    lengths = [5, 17, 3, 30, 8, 21, 12, 9]
    return [{"input_ids": draw.integers(3, tiny.VOCAB, n), "loss_mask": np.arange(n) > 1} for n in lengths]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 20 tokens, so that eight rows fill several."""
    monkeypatch.setattr(features, "_BYTES_PER_BLOCK", 20 * (2 * 32 + 8))


def source_of(target, rows, cache=None):
    return FeatureSource(target, rows, DistillHead.build(target.head_weight), None, cache)


def cache_in(folder, target, rows, max_gb=1.0, rebuild=False):
    return open_cache(folder, target, RowSizes.of(rows), None, max_gb, rebuild)


def alone(target, row):
    return target.features(torch.as_tensor(row["input_ids"])[None])[0]


def test_computed_features_of_a_padded_batch_are_those_of_each_row_alone(target, rows):
    for (found, statistics), row in zip(source_of(target, rows)(range(len(rows))), rows, strict=True):
        expected = alone(target, row)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        logits = target.head(expected)
        torch.testing.assert_close(statistics.normaliser, torch.logsumexp(logits, -1), rtol=1e-5, atol=1e-4)
        assert torch.equal(statistics.argmax, logits.argmax(-1))


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 1000])
def test_cached_features_are_the_computed_ones_in_bfloat16(tmp_path, target, rows, tokens_per_batch):
    cache = cache_in(tmp_path, target, rows)
    assert len(cache.blocks) > 3 and len(cache.missing()) == len(cache.blocks)
    cache.fill(source_of(target, rows), tokens_per_batch)
    assert not cache.missing() and cache.num_rows == len(rows)
    order = [6, 0, 3, 1, 7, 2, 5, 4]
    found = source_of(target, rows, cache_in(tmp_path, target, rows))(order)
    for (feature, statistics), i in zip(found, order, strict=True):
        expected = alone(target, rows[i])
        assert feature.dtype == torch.bfloat16 and feature.shape == expected.shape
        torch.testing.assert_close(feature.float(), expected, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(
            statistics.normaliser, torch.logsumexp(target.head(expected), -1), rtol=1e-5, atol=1e-4
        )


def test_rows_beyond_the_budget_are_computed_and_a_larger_budget_keeps_what_is_there(tmp_path, target, rows):
    token = (2 * 32 + 8) / 1e9
    small = cache_in(tmp_path, target, rows, max_gb=60 * token)
    assert 0 < small.num_rows < len(rows)
    assert small.num_tokens <= 60
    assert "beyond features.max_gb" in small.describe()
    small.fill(source_of(target, rows), 100)
    everything = source_of(target, rows, small)([7, 0, 6])
    for (feature, _), i in zip(everything, [7, 0, 6], strict=True):
        torch.testing.assert_close(feature.float(), alone(target, rows[i]), rtol=1e-2, atol=1e-4)
    large = cache_in(tmp_path, target, rows)
    assert len(large.missing()) == len(large.blocks) - len(small.blocks)


def test_an_interrupted_cache_goes_on_where_it_was(tmp_path, target, rows):
    class Interrupted(FeatureSource):
        def compute(self, numbers):
            if 5 in numbers:
                raise KeyboardInterrupt
            return super().compute(numbers)

    cache = cache_in(tmp_path, target, rows)
    with pytest.raises(KeyboardInterrupt):
        cache.fill(Interrupted(target, rows, DistillHead.build(target.head_weight)), 100)
    there = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert 0 < len(there) < len(cache.blocks)
    again = cache_in(tmp_path, target, rows)
    again.fill(source_of(target, rows), 100)
    assert not again.missing()
    assert all(path.stat().st_mtime_ns == time for path, time in there.items())


def test_processes_share_the_blocks_without_gap_or_overlap(tmp_path, target, rows):
    caches = [cache_in(tmp_path, target, rows) for _ in range(3)]
    caches[0].fill(source_of(target, rows), 100, process_index=0, num_processes=3)
    first = len(caches[0].blocks) - len(caches[0].missing())
    assert 0 < first < len(caches[0].blocks)
    for rank in (1, 2):
        caches[rank].fill(source_of(target, rows), 100, process_index=rank, num_processes=3)
    assert not caches[0].missing()


@pytest.mark.parametrize("change", ["rows", "target", "settings of the target"])
def test_stale_features_are_refused_in_a_folder_of_the_users_and_rebuilt_in_the_runs(
    tmp_path, target, rows, change, caplog
):
    cache_in(tmp_path, target, rows).fill(source_of(target, rows), 100)
    other_target, other_rows = target, rows
    if change == "rows":
        other_rows = [*rows[:-1], {**rows[-1], "input_ids": rows[-1]["input_ids"][::-1].copy()}]
    elif change == "target":
        other_target = load_target(tiny.build("bamba", seed=1))
    else:
        change, other_target = "target", load_target(tiny.build("bamba"))
        other_target.config.rms_norm_eps *= 2
    with pytest.raises(FeatureError, match=f"another {change}; set features.folder"):
        cache_in(tmp_path, other_target, other_rows)
    assert not cache_in(tmp_path, target, rows).missing()
    with caplog.at_level(logging.WARNING):
        rebuilt = cache_in(tmp_path, other_target, other_rows, rebuild=True)
    assert f"another {change}" in caplog.text and "computed again" in caplog.text
    assert len(rebuilt.missing()) == len(rebuilt.blocks)


@pytest.mark.parametrize("key", ["format", "target", "taps", "rows", "precision", "bytes_per_block"])
def test_all_that_features_depend_on_is_compared(tmp_path, target, rows, key):
    cache_in(tmp_path, target, rows)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, key: "other"}))
    with pytest.raises(FeatureError, match=f"another {key}; set"):
        cache_in(tmp_path, target, rows)


def test_features_under_autocast_are_others(tmp_path, target, rows):
    cache_in(tmp_path, target, rows)
    with pytest.raises(FeatureError, match="another precision; set"):
        open_cache(tmp_path, target, RowSizes.of(rows), torch.bfloat16, 1.0, rebuild=False)


@pytest.mark.parametrize("tokens_per_batch", [1, 25, 40])
def test_a_forward_is_within_the_tokens_allowed_with_its_padding(tmp_path, target, rows, tokens_per_batch):
    forwards = []

    class Noting(FeatureSource):
        def compute(self, numbers):
            forwards.append([len(rows[i]["input_ids"]) for i in numbers])
            return super().compute(numbers)

    source = Noting(target, rows, DistillHead.build(target.head_weight))
    cache_in(tmp_path, target, rows).fill(source, tokens_per_batch)
    assert all(len(n) * max(n) <= tokens_per_batch or len(n) == 1 for n in forwards)
    assert tokens_per_batch == 1 or len(forwards) < len(rows)


def test_a_cache_holds_the_taps_and_is_refused_with_others(tmp_path, rows):
    tapped = load_target(tiny.build("bamba"))
    tapped.tap((0, 2))
    cache = cache_in(tmp_path, tapped, rows)
    cache.fill(source_of(tapped, rows), 100)
    (feature, statistics), (computed, expected) = cache.read(3), source_of(tapped, rows).compute([3])[0]
    assert feature.shape[-1] == tapped.feature_dim == 96 and cache.bytes_per_token == 2 * 96 + 8
    torch.testing.assert_close(feature.float(), computed, rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(statistics.normaliser, expected.normaliser, rtol=1e-5, atol=1e-4)
    for taps in ((), (0, 1)):
        other = load_target(tiny.build("bamba"))
        if taps:
            other.tap(taps)
        with pytest.raises(FeatureError, match="another taps; set features.folder"):
            cache_in(tmp_path, other, rows)


def test_the_size_is_predicted_to_the_byte_but_headers(tmp_path, target, rows):
    cache = cache_in(tmp_path, target, rows)
    predicted = cache.num_tokens * cache.bytes_per_token
    assert f"{cache.num_tokens:,} tokens" in cache.describe()
    cache.fill(source_of(target, rows), 100)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert predicted <= written <= predicted + 500 * len(cache.blocks)


def test_a_disk_without_room_is_named_before_anything_is_computed(tmp_path, target, rows, monkeypatch):
    cache = cache_in(tmp_path, target, rows)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(FeatureError, match=r"lower features.max_gb"):
        cache.fill(source_of(target, rows), 100)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "not finite"), (0.0, "all zero")])
def test_features_that_no_draft_can_learn_from_stop_the_run(tmp_path, target, rows, value, message, monkeypatch):
    monkeypatch.setattr(target, "features", lambda ids: torch.full((*ids.shape, 32), value))
    with pytest.raises(FeatureError, match=message):
        cache_in(tmp_path, target, rows).fill(source_of(target, rows), 100)


def test_the_index_says_what_the_features_are_of(tmp_path, target, rows):
    cache_in(tmp_path, target, rows)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["rows"] == RowSizes.of(rows).digest and index["precision"] == "torch.float32"
