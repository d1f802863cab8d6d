"""The Triton kernels' machine code, without a GPU: what the interpreter accepts a compiler may not."""

import pytest

pytest.importorskip("triton")

SPILL_BYTES = 64
# The least that the three targets give a block: 64 KiB on gfx942.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}


def check(target, nodes, scale, monkeypatch, tmp_path):
    from draftwood.kernels import compile_report

    # A fresh cache, so that the compiler really runs.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = compile_report.report(target, nodes, scale)
    names = {row.kernel for row in rows}
    assert {f"tree_{name}_kernel" for name in ("scan", "conv", "selective", "attention_part")} <= names
    assert {"tree_delta_kernel", "tree_delta_kernel (per channel)", "distill_row_kernel"} <= names
    for row in rows:
        assert row.code_bytes > 0
        assert row.shared_bytes <= SHARED_BYTES[target], row
        assert row.spilled_bytes <= SPILL_BYTES, row


def test_every_kernel_compiles_for_hopper(monkeypatch, tmp_path):
    check("sm_90", nodes=13, scale=4, monkeypatch=monkeypatch, tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [13, 64, 256])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_every_kernel_compiles_at_full_size(target, nodes, monkeypatch, tmp_path):
    check(target, nodes, scale=1, monkeypatch=monkeypatch, tmp_path=tmp_path)
