"""What is in the folders is in the package, and the versions of the two make commands fit pyproject."""

import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ["configs", "decode", "kernels", "models", "train"]


def test_every_folder_with_modules_is_listed_as_a_package():
    found = {"draftwood"}
    for folder in FOLDERS:
        found |= {".".join(("draftwood", *p.parent.relative_to(ROOT).parts)) for p in (ROOT / folder).rglob("*.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {
        "draftwood": "draftwood",
        **{f"draftwood.{folder}": folder for folder in FOLDERS},
    }


def test_every_package_has_an_init_file():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.parent


def test_pinned_versions_lie_in_the_ranges():
    pins = dict(
        line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for text in [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), text


def test_the_installed_package_is_this_one():
    installed = {Requirement(text).name for text in requires("draftwood") or [] if "extra ==" not in text}
    assert installed == {Requirement(text).name for text in PROJECT["project"]["dependencies"]}
