"""Every operator test runs once per implementation, through its argument `backend` (`fast_backend`: no reference).

The Triton kernels run here on a GPU, or in the interpreter where TRITON_INTERPRET=1 was set before Python started;
`test_interpreter.py` starts such a run, because triton can't switch once it is imported.
"""

import os

import torch
from hypothesis import settings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    BACKENDS = ["triton"]
else:
    BACKENDS = ["reference", "torch"] + (["triton"] if torch.cuda.is_available() else [])

settings.register_profile("kernels", max_examples=3 if INTERPRETED else 20, deadline=None, derandomize=True)


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS)
    if "fast_backend" in metafunc.fixturenames:
        metafunc.parametrize("fast_backend", [backend for backend in BACKENDS if backend != "reference"])


def pytest_collection_modifyitems(config, items):
    if INTERPRETED:
        here = os.path.dirname(__file__)
        names = {"backend", "fast_backend"}
        items[:] = [item for item in items if names & set(item.fixturenames) or not str(item.path).startswith(here)]
