"""Attention layers become Mamba-2 mixers and everything else stays what it was."""

from contextlib import contextmanager

import pytest
import tiny
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BambaForCausalLM
from transformers.models.bamba import modeling_bamba

from draftwood.models.hybrid import AttentionTaps, build_hybrid, hybrid_config, matrix_scan, mixer_for, replaced
from draftwood.models.mixer_file import load_mixers, save_mixers


@pytest.fixture(scope="module")
def llama():
    return tiny.build("llama").eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, tiny.VOCAB, (2, 70), generator=torch.Generator().manual_seed(0))


def states(model, layers):
    return {i: mixer_for(model, i).state_dict() for i in layers}


@torch.no_grad()
def test_layers_that_stay_give_what_they_gave(llama, ids):
    last = llama.config.num_hidden_layers - 1
    hybrid = build_hybrid(llama, states(llama, [last]))
    wanted = llama.model(ids, output_hidden_states=True).hidden_states[:last]
    found = hybrid.model(ids, output_hidden_states=True).hidden_states[:last]
    assert last > 0
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_hybrid_equals_the_original_with_the_mixer_put_in_place_of_its_attention(llama, ids):
    mixer = mixer_for(llama, 0)
    with replaced(llama.model.layers[0].self_attn, mixer):
        wanted = llama(ids).logits
    found = build_hybrid(llama, {0: mixer.state_dict()})(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(wanted, llama(ids).logits, atol=1e-3)


def test_the_matrix_scan_computes_what_transformers_does(llama, ids):
    hybrid = build_hybrid(llama, states(llama, [0]))
    plain = hybrid(ids, use_cache=False).logits
    expected = torch.autograd.grad(plain.square().mean(), list(hybrid.parameters()), retain_graph=True)
    with matrix_scan():
        fast = hybrid(ids, use_cache=False).logits
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    for a, b in zip(torch.autograd.grad(fast.square().mean(), list(hybrid.parameters())), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_a_mixer_begins_as_linear_attention_of_the_layer_it_replaces(llama, ids):
    """Without SiLU, decay and what step sizes read of the input: sum of (q . k) v, no softmax and no positions."""
    attention, mixer = llama.model.layers[0].self_attn, mixer_for(llama, 0)
    caught = {}
    mixer.norm.register_forward_hook(lambda _, args, out: caught.update(scan=args[0]))
    mixer.A_log.fill_(-40.0)
    mixer.in_proj.weight[-mixer.num_heads :] = 0  # equal step sizes
    x = torch.randn(1, 9, llama.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with linear_convolution():
        mixer(x)
    heads, width = mixer.num_heads, mixer.head_dim
    q, k, v = (getattr(attention, f"{n}_proj")(x).unflatten(-1, (-1, width)) for n in "qkv")
    k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    linear = torch.einsum("bihd,bjhd->bhij", q, k).tril() @ v.transpose(1, 2)
    found = caught["scan"].unflatten(-1, (heads, width)).transpose(1, 2)
    cosine = torch.nn.functional.cosine_similarity(found, linear, dim=-1)
    assert cosine.min() > 0.999


@contextmanager
def linear_convolution():
    saved = modeling_bamba.causal_conv1d_fn
    modeling_bamba.causal_conv1d_fn = lambda h, w, b, **_: F.conv1d(
        h, w[:, None], b, padding=w.shape[1] - 1, groups=h.shape[1]
    )[..., : h.shape[-1]]
    try:
        yield
    finally:
        modeling_bamba.causal_conv1d_fn = saved


@torch.no_grad()
def test_a_saved_hybrid_is_a_plain_transformers_folder(llama, ids, tmp_path):
    hybrid = build_hybrid(llama, states(llama, [0]))
    hybrid.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is BambaForCausalLM
    assert torch.equal(again(ids).logits, hybrid(ids).logits)


@torch.no_grad()
def test_taps_catch_what_goes_into_and_out_of_an_attention_layer(llama, ids):
    taps = AttentionTaps(llama, [0])
    with taps.caught():
        llama(ids)
    layer = llama.model.layers[0]
    torch.testing.assert_close(taps.inputs[0], layer.input_layernorm(llama.model.embed_tokens(ids)))
    with replaced(layer.self_attn, torch.nn.Identity()):
        without = llama.model(ids, output_hidden_states=True).hidden_states[1]
    assert taps.outputs[0].shape == without.shape


def test_mixers_come_back_from_int8_to_half_a_step_of_their_rows(llama, tmp_path):
    saved = states(llama, [0])
    save_mixers(saved, tmp_path / "mixers.safetensors")
    again = load_mixers(tmp_path / "mixers.safetensors")
    assert again.keys() == saved.keys() and again[0].keys() == saved[0].keys()
    for name, weight in saved[0].items():
        step = weight.abs().amax(-1, keepdim=True) / 127 if weight.ndim == 2 else torch.zeros(())
        assert ((again[0][name] - weight).abs() <= step * 0.5001 + 1e-12).all(), name


@pytest.mark.parametrize("layers", [[], [99], "all"])
def test_layers_that_do_not_fit_are_refused(llama, layers):
    count = llama.config.num_hidden_layers
    with pytest.raises(ValueError, match=f"expected some, not all, of 0 to {count - 1}"):
        hybrid_config(llama.config, range(count) if layers == "all" else layers)


def test_another_architecture_is_refused():
    with pytest.raises(ValueError, match="llama-style"):
        hybrid_config(tiny.build("bamba").config, [0])
