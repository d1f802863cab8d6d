"""A tapped target gives the hidden states that its layers read, everywhere it gives features."""

import pytest
import tiny
import torch

import draftwood as dw
from draftwood.models.eagle3_draft import default_taps

# transformers lists what these models' layers give, the others' what they read.
_LISTS_OUTPUTS = {"mamba2", "mamba", "falcon_mamba"}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_taps_are_transformers_own_hidden_states(family):
    model = tiny.build(family)
    target = dw.load_target(model)
    target.tap((1,))
    ids = tiny.prompt_ids((2, 7))
    expected = model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
    tapped, feature = target.features(ids).split(target.hidden_dim, -1)
    torch.testing.assert_close(tapped, expected.hidden_states[0 if family in _LISTS_OUTPUTS else 1].float())
    torch.testing.assert_close(feature, expected.last_hidden_state)


@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "mamba"])
def test_prefill_verify_and_step_give_the_taps_of_a_plain_forward(family):
    """Padding, a tree with branches and ragged rows included; logits are the untapped target's."""
    target, plain = dw.load_target(tiny.build(family)), tiny.target(family)
    target.tap((0, 1))
    ids = tiny.prompt_ids((2, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    state = target.prefill(ids, mask, chunk_size=4)
    assert state.features.shape[-1] == target.feature_dim == 3 * target.hidden_dim
    torch.testing.assert_close(state.features[0], target.features(ids[:1])[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.features[1, :6], target.features(ids[1:, 3:])[0], rtol=1e-4, atol=1e-5)
    tree, tokens = dw.Tree.from_parents([-1, 0, 0, 2]), tiny.prompt_ids((2, 4), 5)
    out = target.verify(state, tokens, tree)
    alone = target.features(torch.cat([ids[:1], tokens[:1, [0, 2, 3]]], 1))[0, -3:]
    torch.testing.assert_close(out.features[0, [0, 2, 3]], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.logits, plain.verify(plain.prefill(ids, mask), tokens, tree).logits)
    even = target.prefill(ids)
    stepped = target.step(even, tokens[:, 0])
    whole = target.features(torch.cat([ids, tokens[:, :1]], 1))[:, -1:]
    torch.testing.assert_close(stepped.features, whole, rtol=1e-4, atol=1e-4)


def test_a_target_has_one_set_of_taps():
    target = dw.load_target(tiny.build("llama"))
    for wrong in ((), (1, 0), (0, 0), (2,), (-1, 0)):
        with pytest.raises(ValueError, match="layers from 0 to 1 of .*, in ascending order"):
            target.tap(wrong)
    target.tap((0,))
    target.tap((0,))
    with pytest.raises(ValueError, match=r"tapped at layers \[0\] for another draft, this one needs \[0, 1\]"):
        target.tap((0, 1))


def test_a_draft_of_features_works_on_a_target_tapped_for_another():
    target = dw.load_target(tiny.build("llama"))
    torch.manual_seed(0)
    draft = dw.EagleDraft.from_target(target)
    prompt = tiny.prompt_ids((1, 6))
    before = dw.generate(target, draft, prompt, max_new_tokens=12)
    target.tap((1,))
    after = dw.generate(target, draft, prompt, max_new_tokens=12)
    assert after.tokens == before.tokens and after.steps == before.steps


def test_default_taps_are_low_middle_and_high():
    assert default_taps(32) == (2, 16, 29)
    for layers in range(1, 40):
        taps = default_taps(layers)
        assert list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < layers
