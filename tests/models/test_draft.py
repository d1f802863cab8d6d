"""EagleDraft: what it computes in training is what it computes in decoding."""

import json
import math

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from trees import parent_lists

import draftwood as dw
from draftwood.models import harmony
from draftwood.models.checkpoint import save_draft

EXAMPLES = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_draft(family="bamba", seed=0, **options):
    torch.manual_seed(seed)
    draft = dw.EagleDraft.from_target(tiny.target(family), **options).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(1.5)
    return draft


def rows_of(batch, length, seed):
    """Random features and next ids; the invariant must hold for any."""
    torch.manual_seed(seed)
    return torch.randn(batch, length, 32), tiny.prompt_ids((batch, length), seed)


VARIANTS = [{}, {"norms": False}, {"num_layers": 2}, {"fusion_bias": True}]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@given(length=st.integers(1, 12), steps=st.integers(1, 5), batch=st.integers(1, 2), seed=st.integers(0, 99))
@EXAMPLES
def test_align_step_j_equals_decoding_on_own_features(variant, length, steps, batch, seed):
    draft = make_draft(seed=seed, **variant).double()
    features, next_ids = rows_of(batch, length, seed)
    features = features.double()  # without norms a rounding error grows from step to step
    with torch.no_grad():
        aligned = draft.align(features, next_ids, steps=steps)
        for j, predicted in enumerate(aligned, 1):
            for t in range(j - 1, length):
                read = t - (j - 1) + 1
                out, cache = draft(features[:, :read], next_ids[:, :read])
                for k in range(j - 1):
                    out, cache = draft(out[:, -1:], next_ids[:, read + k : read + k + 1], cache=cache)
                error = (out[:, -1] - predicted[:, t]).abs().max() / predicted.abs().max()
                assert error < 1e-10, f"align step {j}, row {t}"


def slow_attention(query, keys, values):
    """The definition, row by row: column s of row t at step j comes from the keys of step max(1, j - (t - s))."""
    step, (batch, heads, length, width) = len(keys), query.shape
    group = heads // keys[0].shape[1]
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                source = [max(1, step - (t - s)) - 1 for s in range(t + 1)]
                k = torch.stack([keys[i][b, h // group, s] for s, i in enumerate(source)])
                v = torch.stack([values[i][b, h // group, s] for s, i in enumerate(source)])
                out[b, h, t] = torch.softmax(k @ query[b, h, t] / math.sqrt(width), 0) @ v
    return out


@pytest.mark.parametrize("block", [3, 4, 512])
@given(length=st.integers(1, 9), steps=st.integers(1, 4), seed=st.integers(0, 99))
@EXAMPLES
def test_harmonized_attention_and_its_gradient_equal_the_definition(block, length, steps, seed):
    torch.manual_seed(seed)
    query = torch.randn(2, 4, length, 6, dtype=torch.float64, requires_grad=True)
    keys = [torch.randn(2, 2, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(steps)]
    values = [torch.randn(2, 2, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(steps)]
    weight = torch.randn(2, 4, length, 6, dtype=torch.float64)
    whole, harmony.BLOCK = harmony.BLOCK, block
    try:
        got = harmony.harmonized_attention(query, keys, values)
        got_grads = torch.autograd.grad((got * weight).sum(), [query, *keys, *values], allow_unused=True)
    finally:
        harmony.BLOCK = whole
    want = slow_attention(query, keys, values)
    want_grads = torch.autograd.grad((want * weight).sum(), [query, *keys, *values], allow_unused=True)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for a, b in zip(got_grads, want_grads, strict=True):
        nothing = torch.zeros_like(query if b is None and a is None else (a if b is None else b))
        torch.testing.assert_close(nothing if a is None else a, nothing if b is None else b, rtol=1e-9, atol=1e-11)


@given(length=st.integers(1, 8), padding=st.integers(1, 5), seed=st.integers(0, 99))
@EXAMPLES
def test_right_padding_changes_no_row(length, padding, seed):
    draft = make_draft()
    features, next_ids = rows_of(2, length, seed)
    garbage = torch.full((2, padding, 32), 1e3)
    with torch.no_grad():
        plain = draft.align(features, next_ids, steps=3)
        padded = draft.align(
            torch.cat([features, garbage], 1), torch.cat([next_ids, next_ids.new_zeros(2, padding)], 1), steps=3
        )
    for a, b in zip(plain, padded, strict=True):
        torch.testing.assert_close(b[:, :length], a, rtol=1e-5, atol=1e-5)


@given(parents=parent_lists(max_nodes=9, max_depth=4), seed=st.integers(0, 99))
@EXAMPLES
def test_every_drafted_node_equals_its_own_chain(parents, seed):
    """Level by level with ancestor masks, in a ragged batch of two, against plain calls along each path."""
    draft, tree = make_draft(seed=1), dw.Tree.from_parents(parents)
    depth = tree.depth[0].tolist()
    order = sorted(range(1, len(parents)), key=lambda node: depth[node])
    tokens = tiny.prompt_ids((2, len(parents)), seed)
    lengths = [4, 2]
    features, next_ids = rows_of(2, 4, seed)
    with torch.no_grad():
        state = draft.new_state(2)
        y = draft.extend(state, features, next_ids, counts=lengths)
        roots = torch.stack([y[r, n - 1] for r, n in enumerate(lengths)])
        outputs = {0: roots}
        added = []
        for level in range(1, tree.max_depth + 1):
            nodes = [node for node in order if depth[node] == level]
            added += nodes
            above = torch.tensor([[[a in tree.path(node) for a in added] for node in nodes]])
            parent_out = torch.stack([outputs[parents[node]] for node in nodes], 1)
            out = draft.expand(state, parent_out, tokens[:, nodes], level, above)
            outputs |= {node: out[:, i] for i, node in enumerate(nodes)}
        assert state.lengths == lengths
        for row, n in enumerate(lengths):
            for node in order:
                out, cache = draft(features[row : row + 1, :n], next_ids[row : row + 1, :n])
                for step in tree.path(node)[1:]:
                    out, cache = draft(out[:, -1:], tokens[row : row + 1, step : step + 1], cache=cache)
                torch.testing.assert_close(outputs[node][row], out[0, -1], rtol=1e-4, atol=1e-4)


def test_committed_rows_replace_drafted_ones():
    """After a tree, a commit leaves exactly the state that the target's features alone would give."""
    draft = make_draft()
    features, next_ids = rows_of(1, 7, 3)
    with torch.no_grad():
        state = draft.new_state(1)
        y = draft.extend(state, features[:, :3], next_ids[:, :3])
        draft.expand(state, y[:, -1:], next_ids[:, 3:4], 1, torch.ones(1, 1, 1, dtype=torch.bool))
        got = draft.extend(state, features[:, 3:], next_ids[:, 3:])
        want, _ = draft(features, next_ids)
    torch.testing.assert_close(got, want[:, 3:], rtol=1e-5, atol=1e-5)


def test_only_the_drafts_own_weights_are_saved(tmp_path):
    vocab = torch.tensor([9, 3, 30, 4])
    draft = make_draft(draft_vocab=vocab)
    save_draft(draft, tmp_path, {"note": "test"})
    keys = set(load_file(tmp_path / "draft.safetensors"))
    assert keys == set(draft.state_dict()) and not any("embed" in key and "norm" not in key for key in keys)
    loaded = dw.load_draft(tmp_path, draft.target)
    assert loaded.draft_vocab.tolist() == [3, 4, 9, 30]
    features, next_ids = rows_of(1, 5, 0)
    with torch.no_grad():
        predicted = draft(features, next_ids)[0]
        assert torch.equal(loaded(features, next_ids)[0], predicted)
        full = draft.target.head(predicted)
        torch.testing.assert_close(loaded.logits(predicted), full[..., [3, 4, 9, 30]])


def test_a_config_field_that_would_be_ignored_is_refused(tmp_path):
    save_draft(make_draft(), tmp_path)
    description = json.loads((tmp_path / "draft.json").read_text())
    description["config"]["shape"]["partial_rotary_factor"] = 0.5
    (tmp_path / "draft.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        dw.load_draft(tmp_path, tiny.target("bamba"))


@pytest.mark.parametrize(("field", "value"), [("rope_theta", 20.0), ("norm_eps", 0.5)])
def test_every_saved_field_of_the_shape_matters(field, value, tmp_path):
    """What is saved is what runs: a changed field changes the output."""
    draft = make_draft()
    save_draft(draft, tmp_path)
    description = json.loads((tmp_path / "draft.json").read_text())
    description["config"]["shape"][field] = value
    (tmp_path / "draft.json").write_text(json.dumps(description))
    features, next_ids = rows_of(1, 6, 0)
    with torch.no_grad():
        changed = dw.load_draft(tmp_path, draft.target)(features, next_ids)[0]
        assert not torch.allclose(changed, draft(features, next_ids)[0], atol=1e-3)


def test_a_draft_of_another_target_is_refused(tmp_path):
    save_draft(make_draft("llama"), tmp_path)
    with pytest.raises(ValueError, match="model_type llama, but .* has qwen3"):
        dw.load_draft(tmp_path, tiny.target("qwen3"))
    with pytest.raises(ValueError, match="another head"):
        dw.load_draft(tmp_path, dw.load_target(tiny.build("llama", seed=5)))
    with pytest.raises(FileNotFoundError, match="no draft.json"):
        dw.load_draft(tmp_path / "nothing", tiny.target("llama"))


def test_a_damaged_checkpoint_is_named(tmp_path):
    target = tiny.target("bamba")
    save_draft(make_draft(), tmp_path)
    whole = (tmp_path / "draft.safetensors").read_bytes()
    (tmp_path / "draft.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="damaged draft checkpoint"):
        dw.load_draft(tmp_path, target)
    (tmp_path / "draft.safetensors").write_bytes(whole)
    description = json.loads((tmp_path / "draft.json").read_text())
    description["config"]["shape"]["intermediate_dim"] = 7
    (tmp_path / "draft.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="gate_proj.weight is .* by draft.json"):
        dw.load_draft(tmp_path, target)
    (tmp_path / "draft.json").write_text('{"format": 1, "kind": "eagle"}')
    with pytest.raises(ValueError, match="no 'target'"):
        dw.load_draft(tmp_path, target)


def test_a_reduced_head_follows_the_targets():
    target = dw.load_target(tiny.build("llama"))
    draft = dw.EagleDraft.from_target(target, draft_vocab=torch.tensor([5, 6]))
    before = draft.head_weight.clone()
    with torch.no_grad():
        target.head_weight.add_(1.0)
    torch.testing.assert_close(draft.head_weight, before + 1)
