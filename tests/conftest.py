"""The repository root must not be importable: its folder kernels/ would shadow the package of that name."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="write tests/golden anew instead of comparing")
