"""Tiny, randomly initialised models for the tests, one per family, small enough to run thousands of forwards."""

import functools

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, EOS = 61, 2
_COMMON = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=EOS, hidden_size=32)
_ATTENTION = dict(_COMMON, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
_FAMILIES = {
    "llama": dict(_ATTENTION, num_hidden_layers=2),
    "qwen3": dict(_ATTENTION, num_hidden_layers=2, head_dim=8),
    "mamba2": dict(
        _COMMON, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=8, expand=2
    ),
    "bamba": dict(
        _ATTENTION, num_hidden_layers=3, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
        mamba_n_groups=2, mamba_expand=2, mamba_chunk_size=8,
    ),
}  # fmt: skip
FAMILIES = list(_FAMILIES)


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model in eval mode: decays spread out, logits far from uniform, EOS reached now and then."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **_FAMILIES[family])
    config._attn_implementation = "eager" if family == "mamba2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(-3.0, 1.0)
            elif name.endswith("A_log"):
                parameter.uniform_(-1.0, 2.0)
            elif parameter.ndim >= 2:
                parameter.mul_(3.0)
    return model


def prompt_ids(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Random ids without the special ones, int64."""
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Tensor, max_new_tokens: int) -> list[int]:
    """transformers' own greedy continuation of one row [1, T], EOS included."""
    out = model.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, prompt.shape[1] :].tolist()


@functools.cache
def target(family: str):
    """The family's tiny model as a target, made once."""
    import draftwood as dw

    return dw.load_target(build(family))
