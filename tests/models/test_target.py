"""The target against plain, uncached forwards of the unmodified transformers model."""

import random

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from trees import parent_lists, random_path

import draftwood as dw
from draftwood.models.target import open_target

FAMILIES = tiny.FAMILIES
EXAMPLES = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=FAMILIES)
def target(request):
    return tiny.target(request.param)


def relative(got, want):
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-9)).item()


@torch.no_grad()
def path_logits(model, prompt, tokens, parents):
    """[n, V]: one plain forward per root-to-node path."""
    tree = dw.Tree.from_parents(parents)
    rows = [torch.cat([prompt, tokens[tree.path(node)]]) for node in range(len(parents))]
    return torch.stack([model(row[None], use_cache=False).logits[0, -1] for row in rows])


def assert_same_state(state, fresh, tolerance=2e-5):
    """Every layer of two states of one row each holds the same, up to rounding."""
    assert state.lengths == fresh.lengths
    for got, want in zip(state.cache.layers, fresh.cache.layers, strict=True):
        if hasattr(want, "buffer"):
            assert got.start == want.start
            for name in ("keys", "values"):
                a, b = getattr(got.buffer, name), getattr(want.buffer, name)
                assert relative(a[:, :, : want.start], b[:, :, : want.start]) < tolerance
        for name in ("conv_states", "recurrent_states"):
            b = getattr(want, name, {0: None})[0]
            if b is not None:
                assert relative(getattr(got, name)[0].float(), b.float()) < tolerance


@given(parents=parent_lists(), length=st.integers(1, 9), seed=st.integers(0, 999))
@EXAMPLES
def test_every_node_equals_its_own_path(target, parents, length, seed):
    prompt, tokens = tiny.prompt_ids((1, length), seed), tiny.prompt_ids((1, len(parents)), seed + 1)
    state = target.prefill(prompt)
    tree = dw.Tree.from_parents(parents)
    out = target.verify(state, tokens, tree)
    assert relative(out.logits[0], path_logits(target.model, prompt[0], tokens[0], parents)) < 2e-5
    assert torch.equal(target.verify(state, tokens, tree).logits, out.logits), "verify must leave the state alone"
    assert relative(target.head(out.features), out.logits) < 1e-5


@given(rounds=st.lists(parent_lists(), min_size=2, max_size=3), length=st.integers(1, 6), seed=st.integers(0, 999))
@EXAMPLES
def test_commit_gives_the_state_of_a_fresh_prefill(target, rounds, length, seed):
    rng, done = random.Random(seed), tiny.prompt_ids((1, length), seed)
    state = target.prefill(done)
    for parents in rounds:
        tokens = tiny.prompt_ids((1, len(parents)), rng.randrange(999))
        target.verify(state, tokens, dw.Tree.from_parents(parents))
        path = random_path(parents, rng)
        target.commit(state, [path])
        done = torch.cat([done, tokens[:, path]], 1)
        assert_same_state(state, target.prefill(done))


def test_steps_with_and_without_drafts_alternate(target):
    done = tiny.prompt_ids((1, 5))
    state = target.prefill(done)
    for turn in range(6):
        token = tiny.prompt_ids((1, 1), turn)
        if turn % 2:
            target.step(state, token[:, 0])
            done = torch.cat([done, token], 1)
        else:
            tokens = torch.cat([token, tiny.prompt_ids((1, 4), 50 + turn)], 1)
            target.verify(state, tokens, dw.Tree.from_parents([-1, 0, 0, 2, 3]))
            target.commit(state, [[0, 2, 3, 4]])
            done = torch.cat([done, tokens[:, [0, 2, 3, 4]]], 1)
        assert_same_state(state, target.prefill(done))


@pytest.mark.parametrize("accepted", [1, 2, 3, 4, 5])
def test_conv_window_and_state_roll_on_together(target, accepted):
    prompt, tokens = tiny.prompt_ids((1, 2)), tiny.prompt_ids((1, 5), 1)
    state = target.prefill(prompt)
    target.verify(state, tokens, dw.Tree.chain(4))
    target.commit(state, [list(range(accepted))])
    assert_same_state(state, target.prefill(torch.cat([prompt, tokens[:, :accepted]], 1)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_ragged_batch_equals_its_single_rows(target, side):
    lengths, parents = [3, 7, 1], [-1, 0, 0, 1, 3, 2]
    rows = [tiny.prompt_ids((1, n), n) for n in lengths]
    ids = torch.zeros(3, 7, dtype=torch.int64)
    mask = torch.zeros(3, 7, dtype=torch.int64)
    for r, row in enumerate(rows):
        where = slice(7 - lengths[r], 7) if side == "left" else slice(0, lengths[r])
        ids[r, where], mask[r, where] = row[0], 1
    state = target.prefill(ids, mask)
    features = target.features(ids, mask)
    done = list(rows)
    for turn, paths in enumerate(([[0, 2, 5], [], [0]], [[0, 1, 3, 4], [0], [0, 1]], [[0], [0, 2], []])):
        tokens = tiny.prompt_ids((3, 6), 10 + turn)
        tree = dw.Tree.from_parents(parents)
        logits = target.verify(state, tokens, tree).logits
        for r in range(3):
            assert relative(logits[r], path_logits(target.model, done[r][0], tokens[r], parents)) < 2e-5
        target.commit(state, paths)
        done = [
            torch.cat([row, tokens[r : r + 1, path]], 1) for r, (row, path) in enumerate(zip(done, paths, strict=True))
        ]
        assert state.lengths == [row.shape[1] for row in done]
    stepped = target.step(state, torch.tensor([5, 6, 7])).logits
    for r, row in enumerate(done):
        alone = target.model(torch.cat([row, torch.tensor([[5 + r]])], 1), use_cache=False).logits[0, -1]
        assert relative(stepped[r, 0], alone) < 2e-5
        where = slice(7 - lengths[r], 7) if side == "left" else slice(0, lengths[r])
        assert relative(features[r, where], target.features(rows[r])[0]) < 1e-5
    assert not features[mask == 0].any()


def test_rows_may_have_trees_of_their_own(target):
    prompts, tokens = tiny.prompt_ids((2, 4)), tiny.prompt_ids((2, 5), 1)
    forests = [[-1, 0, 1, 1, 3], [-1, 0, 0]]
    tree = dw.Tree.from_parents(forests)
    state = target.prefill(prompts)
    logits = target.verify(state, tokens, tree).logits
    for r, parents in enumerate(forests):
        want = path_logits(target.model, prompts[r], tokens[r], parents)
        assert relative(logits[r, : len(parents)], want) < 2e-5
    target.commit(state, [[0, 1, 3, 4], [0, 2]])
    after = target.step(state, torch.tensor([9, 9])).logits
    for r, path in enumerate(([0, 1, 3, 4], [0, 2])):
        row = torch.cat([prompts[r], tokens[r, path], torch.tensor([9])])
        assert relative(after[r, 0], target.model(row[None], use_cache=False).logits[0, -1]) < 2e-5


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("batch", [1, 2])
def test_chunked_prefill_gives_one_state(target, chunk_size, batch):
    ids = tiny.prompt_ids((batch, 13))
    chunked, whole = target.prefill(ids, chunk_size=chunk_size), target.prefill(ids)
    assert_same_state(chunked, whole)
    assert relative(chunked.last_logits, whole.last_logits) < 2e-5
    assert relative(chunked.features, whole.features) < 2e-5


def test_the_model_itself_is_untouched(target):
    ids = tiny.prompt_ids((1, 6))
    before = target.model(ids).logits
    state = target.prefill(ids)
    target.verify(state, ids, dw.Tree.chain(5))
    assert torch.equal(target.model(ids).logits, before)


def test_what_does_not_fit_is_named():
    target = tiny.target("bamba")
    state = target.prefill(tiny.prompt_ids((1, 3)))
    with pytest.raises(ValueError, match=r"tokens \[1, 3\].*got \[1, 2\]"):
        target.verify(state, torch.ones(1, 2, dtype=torch.int64), dw.Tree.chain(2))
    with pytest.raises(ValueError, match="commit without a verify"):
        target.commit(state, [[0]])
    target.verify(state, torch.ones(1, 3, dtype=torch.int64), dw.Tree.from_parents([-1, 0, 0]))
    with pytest.raises(ValueError, match="row 0: path .* node 2 is not a child of node 1"):
        target.commit(state, [[0, 1, 2]])
    with pytest.raises(ValueError, match="1 rows, got 2 paths"):
        target.commit(state, [[0], [0]])
    with pytest.raises(ValueError, match="row 1 of the prompts has no token"):
        target.prefill(torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 1], [0, 0, 0]]))


def test_an_unknown_family_is_refused_by_name():
    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=16, vocab_size=31)
    with pytest.raises(ValueError, match="model type 'gpt2' .*known: .*bamba"):
        dw.load_target(AutoModelForCausalLM.from_config(config))


def test_an_unknown_layer_type_is_refused_by_name():
    model = tiny.build("qwen3")
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="layer 1 of this qwen3 model is of type 'sliding_attention'"):
        dw.load_target(model)


def test_features_that_are_not_what_the_head_reads_are_refused():
    model = tiny.build("llama")
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = scaled
    with pytest.raises(ValueError, match=r"head\(features\) differs from the model's logits by 3"):
        dw.load_target(model)


def test_zero_features_are_refused():
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.norm.weight.zero_()
    with pytest.raises(ValueError, match="features are zero"):
        dw.load_target(model)


def test_a_cached_forward_that_drops_the_state_is_refused(monkeypatch):
    from draftwood.models.cache import DecodeCache

    monkeypatch.setattr(DecodeCache, "get_recurrent_state", lambda self, layer_idx, state_idx=0: None)
    with pytest.raises(ValueError, match="several tokens with the cache differs"):
        dw.load_target(tiny.build("bamba"))


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_eager_attention_takes_the_tree_as_a_mask(family):
    model = tiny.build(family)
    model.set_attn_implementation("eager")
    target = dw.load_target(model)
    forest, tokens = [[-1, 0, 0, 1, 3], [-1, 0, 1]], tiny.prompt_ids((2, 5), 1)
    prompts = tiny.prompt_ids((2, 4))
    state = target.prefill(prompts)
    logits = target.verify(state, tokens, dw.Tree.from_parents(forest)).logits
    for row, parents in enumerate(forest):
        want = path_logits(model, prompts[row], tokens[row], parents)
        assert relative(logits[row, : len(parents)], want) < 2e-5


def test_attention_that_takes_no_mask_is_refused():
    model = tiny.build("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' takes no tree mask"):
        dw.load_target(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_the_length_are_refused(kind):
    model = tiny.build("llama")
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0}
    with pytest.raises(ValueError, match=f"rotary positions of type '{kind}'"):
        dw.load_target(model)


@pytest.mark.parametrize("name, message", [
    ("smolm2-135m", "no model 'smolm2-135m' .did you mean 'smollm2-135m'.*; expected a built-in name"),
    ("", "no model ''; expected"),
    ("./nowhere", "no model './nowhere'; expected a built-in name .*, a folder or a hub id$"),
    ("/nowhere/at/all", "no model '/nowhere/at/all'; expected"),
])  # fmt: skip
def test_a_name_that_can_not_be_a_model_is_refused_without_asking_the_hub(name, message, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: 1 / 0)
    with pytest.raises(FileNotFoundError, match=message):
        open_target(name)


def test_what_the_hub_says_is_one_line(monkeypatch):
    def refuse(*_, **__):
        raise OSError("out of reach\nCheck your connection")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(FileNotFoundError, match=r"no model 'owner/none'; expected .*Of the hub: out of reach\Z"):
        open_target("owner/none")


def test_a_refused_model_stays_as_it_was():
    model = tiny.build("llama").train()
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ValueError, match="takes no tree mask"):
        dw.load_target(model)
    assert model.training and all(p.requires_grad for p in model.parameters())


def test_padding_is_on_no_path():
    target = tiny.target("bamba")
    state = target.prefill(tiny.prompt_ids((2, 3)))
    target.verify(state, tiny.prompt_ids((2, 3), 1), dw.Tree.from_parents([[-1], [-1, 0, 0]]))
    with pytest.raises(ValueError, match=r"row 0: path \[0, 2\] is not a path"):
        target.commit(state, [[0, 2], [0]])


def test_a_loaded_model_still_compiles():
    target = tiny.target("bamba")
    ids = tiny.prompt_ids((1, 6))
    compiled = torch.compile(target.model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        got = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(got, target.model(ids, use_cache=False).logits)


def test_a_subclass_of_a_known_model_is_that_model():
    model = tiny.build("bamba")
    model.__class__ = type("Mine", (type(model),), {"__module__": "somewhere"})
    state = dw.load_target(model).prefill(tiny.prompt_ids((1, 3)))
    assert state.lengths == [3]


@pytest.mark.parametrize(("device", "message"), [("foo", "not one torch knows"), ("cuda", "no GPU is visible")])
def test_a_device_that_is_not_there_is_named(device, message, tmp_path):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    tiny.build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_target(tmp_path, device=device)
