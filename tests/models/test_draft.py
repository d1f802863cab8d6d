"""Drafts of every kind: what one computes in training is what it computes in decoding."""

import json
import math

import pytest
import tiny
import torch
from drafts import VARIANTS, make_draft, plain_outputs, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from trees import parent_lists

import draftwood as dw
from draftwood.models import harmony, harmony_scan
from draftwood.models.checkpoint import check_draft, save_draft

EXAMPLES = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = [variant for variant in VARIANTS if len(variant) == 1]


def assert_align_steps_equal_decoding(variant, length, steps, batch, seed, dtype, tolerance):
    """The tolerance is in parts of the largest output of a step."""
    draft = make_draft(seed=seed, **variant).to(dtype)
    features, next_ids = rows_of(draft, batch, length, seed)
    features = features.to(dtype)
    with torch.no_grad():
        aligned = draft.align(features, next_ids, steps=steps)
        for j, predicted in enumerate(aligned, 1):
            for t in range(j - 1, length):
                read = t - (j - 1) + 1
                out, cache = draft(features[:, :read], next_ids[:, :read])
                for k in range(j - 1):
                    out, cache = draft(out[:, -1:], next_ids[:, read + k : read + k + 1], cache=cache)
                error = (out[:, -1] - predicted[:, t]).abs().max() / predicted.abs().max()
                assert error < tolerance, f"seed {seed}, align step {j}, row {t}"


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@given(length=st.integers(1, 12), steps=st.integers(1, 5), batch=st.integers(1, 2), seed=st.integers(0, 99))
@EXAMPLES
def test_align_step_j_equals_decoding_on_own_features(variant, length, steps, batch, seed):
    assert_align_steps_equal_decoding(variant, length, steps, batch, seed, torch.float64, 1e-10)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_align_step_j_equals_decoding_in_float32_too(variant):
    """Always the same rows, at most 7e-6 off: of 500 drawn ones weights as large as these made 4e-4 of rounding without
    norms, 6e-5 through two Mamba layers."""
    for seed in range(4):
        assert_align_steps_equal_decoding(variant, 10, 4, 2, seed, torch.float32, 2e-5)


@pytest.mark.parametrize("detaches", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_align_and_its_gradients_equal_rows_run_one_at_a_time(variant, detaches, monkeypatch):
    """Every row of every step by itself, as decoding would reach it, without caches, chunks or masks."""
    monkeypatch.setattr(harmony, "BLOCK", 4)
    monkeypatch.setattr(harmony_scan, "CHUNK", 4)
    length, steps = 6, 3
    draft = make_draft(seed=3, **variant).double().train()
    draft.detaches = detaches
    features, next_ids = rows_of(draft, 2, length, 5)
    features = features.double().requires_grad_()
    inputs = [features, *draft.parameters()]
    aligned = draft.align(features, next_ids, steps)
    slow = torch.zeros(steps, *aligned[0].shape, dtype=torch.float64)
    weights = torch.randn(slow.shape, dtype=torch.float64)
    expected = 0.0
    for j in range(1, steps + 1):
        for t in range(j - 1, length):
            read = t - (j - 1) + 1
            rows = draft.read(features[:, :read])
            for k in range(j):
                out = plain_outputs(draft, rows, next_ids[:, : read + k])[:, -1:]
                rows = torch.cat([rows, out.detach() if detaches else out], 1)
            slow[j - 1, :, t] = out[:, 0].detach()
            expected = expected + (out[:, 0] * weights[j - 1, :, t]).sum()
    got = sum((y[:, j:] * weights[j, :, j:]).sum() for j, y in enumerate(aligned))
    for j, y in enumerate(aligned):
        torch.testing.assert_close(y[:, j:], slow[j, :, j:], rtol=1e-9, atol=1e-11)
    grads, slow_grads = (torch.autograd.grad(total, inputs, allow_unused=True) for total in (got, expected))
    for name, a, b in zip(["features", *dict(draft.named_parameters())], grads, slow_grads, strict=True):
        if name in ("norm.weight", "lm_head.weight") and draft.own_head is not None:  # of the head, not of `align`
            continue
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9 * b.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}")


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


@pytest.mark.parametrize("variant", KINDS, ids=str)
@given(length=st.integers(1, 8), padding=st.integers(1, 5), seed=st.integers(0, 99))
@EXAMPLES
def test_right_padding_changes_no_row(variant, length, padding, seed):
    draft = make_draft(**variant)
    features, next_ids = rows_of(draft, 2, length, seed)
    garbage = torch.full((2, padding, features.shape[-1]), 1e3)
    with torch.no_grad():
        plain = draft.align(features, next_ids, steps=3)
        padded = draft.align(
            torch.cat([features, garbage], 1), torch.cat([next_ids, next_ids.new_zeros(2, padding)], 1), steps=3
        )
    for a, b in zip(plain, padded, strict=True):
        torch.testing.assert_close(b[:, :length], a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", KINDS, ids=str)
@given(parents=parent_lists(max_nodes=9, max_depth=4), seed=st.integers(0, 99), own_ancestors=st.booleans())
@EXAMPLES
def test_every_drafted_node_equals_its_own_chain(variant, parents, seed, own_ancestors):
    """Level by level with ancestor masks, in a ragged batch of two, against plain calls along each path."""
    draft, tree = make_draft(seed=1, **variant), dw.Tree.from_parents(parents)
    depth = tree.depth[0].tolist()
    order = sorted(range(1, len(parents)), key=lambda node: depth[node])
    tokens = tiny.prompt_ids((2, len(parents)), seed)
    lengths = [4, 2]
    features, next_ids = rows_of(draft, 2, 4, seed)
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
            above = above.expand(2, -1, -1) if own_ancestors else above
            parent_out = torch.stack([outputs[parents[node]] for node in nodes], 1)
            out = draft.expand(state, parent_out, tokens[:, nodes], level, above)
            outputs |= {node: out[:, i] for i, node in enumerate(nodes)}
        for row, n in enumerate(lengths):
            for node in order:
                out, cache = draft(features[row : row + 1, :n], next_ids[row : row + 1, :n])
                for step in tree.path(node)[1:]:
                    out, cache = draft(out[:, -1:], tokens[row : row + 1, step : step + 1], cache=cache)
                torch.testing.assert_close(outputs[node][row], out[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", KINDS, ids=str)
def test_committed_rows_replace_drafted_ones(variant):
    """After a tree, a commit leaves exactly the state that the target's features alone would give."""
    draft = make_draft(**variant)
    features, next_ids = rows_of(draft, 1, 7, 3)
    with torch.no_grad():
        state = draft.new_state(1)
        y = draft.extend(state, features[:, :3], next_ids[:, :3])
        draft.expand(state, y[:, -1:], next_ids[:, 3:4], 1, torch.ones(1, 1, 1, dtype=torch.bool))
        got = draft.extend(state, features[:, 3:], next_ids[:, 3:])
        want, _ = draft(features, next_ids)
    torch.testing.assert_close(got, want[:, 3:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", KINDS, ids=str)
@given(data=st.data(), seed=st.integers(0, 99))
@EXAMPLES
def test_ragged_commits_equal_the_rows_alone(variant, data, seed):
    """Rows that take in different numbers of tokens, some none, in every commit."""
    draft = make_draft(**variant)
    features, next_ids = rows_of(draft, 3, 20, seed)
    taken, state = [0, 0, 0], draft.new_state(3)
    with torch.no_grad():
        for _ in range(3):
            counts = data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any))
            width = max(counts)
            block = [torch.stack([x[b, n : n + width] for b, n in enumerate(taken)]) for x in (features, next_ids)]
            got = draft.extend(state, *block, counts)
            for b, count in enumerate(counts):
                if count == 0:
                    continue
                alone, _ = draft(features[b : b + 1, : taken[b] + count], next_ids[b : b + 1, : taken[b] + count])
                torch.testing.assert_close(got[b, :count], alone[0, taken[b] :], rtol=1e-4, atol=1e-4)
            taken = [n + count for n, count in zip(taken, counts, strict=True)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_only_the_drafts_own_weights_are_saved(variant, tmp_path):
    vocab = torch.tensor([9, 3, 30, 4])
    draft = make_draft(draft_vocab=vocab, **variant)
    save_draft(draft, tmp_path, {"note": "test"})
    keys = set(load_file(tmp_path / "draft.safetensors"))
    assert keys == set(draft.state_dict()) and not any("embed" in key and "norm" not in key for key in keys)
    loaded = dw.load_draft(tmp_path, draft.target)
    assert type(loaded) is type(draft) and loaded.options == draft.options
    assert loaded.draft_vocab.tolist() == [3, 4, 9, 30]
    features, next_ids = rows_of(draft, 1, 5, 0)
    with torch.no_grad():
        predicted = draft(features, next_ids)[0]
        assert torch.equal(loaded(features, next_ids)[0], predicted)
        full = draft.target.head(draft.head_input(predicted))  # which a head of its own starts from
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
    features, next_ids = rows_of(draft, 1, 6, 0)
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


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "a list, not an object"),
        ('{"format": 1, "kind": []}', "kind \\[\\]"),
        ('{"format": 1, "kind": "eagle", "target": {}, "config": {}}', "'target' has no name, model_type"),
        ("{", "damaged draft checkpoint"),
    ],
)
def test_a_description_of_something_else_is_named(text, message, tmp_path):
    save_draft(make_draft(), tmp_path)
    (tmp_path / "draft.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        dw.load_draft(tmp_path, tiny.target("bamba"))


def test_the_config_of_its_target_is_enough_to_refuse_a_draft_of_another(tmp_path):
    for family in ("llama", "bamba", "mamba2"):
        save_draft(make_draft(family), tmp_path)
        check_draft(tmp_path, "it", tiny.target(family).config)
    with pytest.raises(ValueError, match="--target"):
        check_draft(tmp_path, "other", tiny.target("llama").config)


def test_an_eagle3_head_reads_the_normed_hidden_state():
    draft = make_draft(kind="eagle3")
    y = 5 * torch.randn(2, 3, 32)
    normed = y / (y.pow(2).mean(-1, keepdim=True) + draft.config.shape.norm_eps).sqrt() * draft.norm.weight
    torch.testing.assert_close(draft.logits(y), normed @ draft.lm_head.weight.T)


@pytest.mark.parametrize("had_norms", [True, False])
def test_a_checkpoint_that_said_norms_with_a_bool_still_loads(had_norms, tmp_path):
    draft = make_draft(norms="all" if had_norms else "none")
    save_draft(draft, tmp_path)
    description = json.loads((tmp_path / "draft.json").read_text())
    description["config"]["norms"] = had_norms
    (tmp_path / "draft.json").write_text(json.dumps(description))
    assert dw.load_draft(tmp_path, draft.target).config == draft.config


def test_an_unknown_kind_of_draft_is_named(tmp_path):
    save_draft(make_draft(), tmp_path)
    description = json.loads((tmp_path / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps({**description, "kind": "owl"}))
    with pytest.raises(ValueError, match="kind 'owl'; this version reads format 1, kinds eagle, eagle3, mamba"):
        dw.load_draft(tmp_path, tiny.target("bamba"))


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
