"""The Triton kernels' values, without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_triton_kernels_pass_the_operator_tests_in_the_interpreter():
    # A process of its own: triton reads the variable once, when it is imported.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


def test_the_gpu_check_passes_at_tiny_sizes(tmp_path):
    results = tmp_path / "gpu.json"
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--smoke", "--json", str(results)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    rows = json.loads(results.read_text())
    assert {row["operator"].split()[0] for row in rows["checks"]} == {
        *("tree_scan", "tree_conv", "tree_delta", "tree_selective", "tree_attention", "distill_loss")
    }
    assert all(row["torch_us"] for row in rows["timings"] if row["name"].startswith("tree_"))
    losses = [row for row in rows["timings"] if row["name"].startswith("distill_loss")]
    assert len(losses) == 4 and all(row["eager_us"] for row in losses)
