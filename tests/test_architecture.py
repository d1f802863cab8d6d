"""Imports go one way, importing does nothing, and no source file grows too long."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["kernels", "models", "decode", "train"]
ALLOWED = {name: set(FOLDERS[: i + 1]) for i, name in enumerate(FOLDERS)}
ALLOWED["configs"] = {"configs"}
ALLOWED["train"] = ALLOWED["train"] | {"configs"}
SOURCES = [path for folder in ALLOWED for path in sorted((ROOT / folder).rglob("*.py"))]


def imported_folders(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            names = [node.module]
            if node.module == "draftwood":
                names = [f"draftwood.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            assert first not in ALLOWED, f"{path}, line {node.lineno}: import draftwood.{name}, not {name}"
            if first == "draftwood" and rest and rest[0] in ALLOWED:
                yield rest[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    folder = path.relative_to(ROOT).parts[0]
    assert set(imported_folders(path)) <= ALLOWED[folder]


def test_no_source_file_is_over_500_lines():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 500}
    assert not long


def test_importing_the_package_does_nothing():
    code = (
        "import sys, draftwood; from draftwood import __all__; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'heavy import'; "
        "assert set(dir(draftwood)) == set(__all__); "
        "[getattr(draftwood, name) for name in __all__]; "
        "assert 'wandb' not in sys.modules and 'mamba_ssm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout


def test_an_unknown_public_name_is_named():
    import draftwood

    with pytest.raises(AttributeError, match="no attribute 'load_targett'; public names: .*load_target"):
        draftwood.load_targett  # noqa: B018
