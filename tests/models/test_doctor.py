"""The doctor calls a sound target sound and finds what is wrong with a broken one."""

from dataclasses import replace

import pytest
import tiny
import torch

from draftwood.kernels.tables import TreeTables
from draftwood.models import seam
from draftwood.models.doctor import diagnose
from draftwood.models.target import Target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sound_targets_pass_every_check(family, dtype):
    diagnosis = diagnose(Target(tiny.build(family).to(dtype)))
    assert diagnosis.is_healthy, [f for f in diagnosis.findings if not f.passed]
    assert len(diagnosis.findings) == 5
    facts = diagnosis.facts
    assert sum(facts["layers"].values()) == Target(tiny.build(family)).config.num_hidden_layers
    if family == "bamba":  # two Mamba-2 layers: window [96, 4] and state [4, 16, 8]; one attention layer: [2, 2, 8]
        element = torch.empty((), dtype=dtype).element_size()
        assert facts["state_bytes_per_row"] == 2 * (96 * 4 * element + 4 * 16 * 8 * 4)
        assert facts["kv_bytes_per_token"] == 2 * 2 * 8 * element
        assert facts["kept_bytes_per_node"] < facts["state_per_node_bytes"]


def failed(target):
    return [f.name for f in diagnose(target).findings if not f.passed]


def test_a_scan_that_flattens_the_tree_is_found():
    target = Target(tiny.build("bamba"))

    def flat(forward, *args, **kwargs):
        chain = TreeTables.from_parents(torch.arange(-1, forward.tables.num_nodes - 1)[None])
        return seam.OPERATORS["mamba2_chunk_scan"](replace(forward, tables=chain), *args, **kwargs)

    target.operators = {**seam.OPERATORS, "mamba2_chunk_scan": flat}
    assert "every node of a tree equals its own path" in failed(target)


def test_a_conv_window_that_is_not_rolled_on_is_found(monkeypatch):
    from draftwood.models import cache

    monkeypatch.setattr(cache, "tree_conv_commit", lambda window, x, tables, nodes: window.clone())
    assert failed(Target(tiny.build("bamba"))) == ["state after commit equals a fresh prefill"]


def test_features_that_the_head_does_not_read_are_found():
    model = tiny.build("llama")
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = scaled
    assert failed(Target(model)) == ["head reproduces the logits from the features"]
