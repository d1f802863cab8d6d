"""Tiny, randomly initialised models for the tests, one per family, small enough to run thousands of forwards."""

import functools

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, EOS = 61, 2
_COMMON = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=EOS, hidden_size=32)
_ATTENTION = dict(_COMMON, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
_LINEAR = ["linear_attention", "full_attention"]
_MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_expand=2, mamba_chunk_size=8)
_DELTA = dict(
    num_hidden_layers=2, layer_types=_LINEAR, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8,
)  # fmt: skip
_MAMBA1 = dict(_COMMON, num_hidden_layers=2, state_size=4, conv_kernel=4, expand=2, time_step_rank=4)
_FAMILIES = {
    "llama": dict(_ATTENTION, num_hidden_layers=2),
    "qwen3": dict(_ATTENTION, num_hidden_layers=2, head_dim=8),
    "mamba2": dict(
        _COMMON, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=8, expand=2
    ),
    "bamba": dict(_ATTENTION, **_MAMBA2, num_hidden_layers=3, attn_layer_indices=[1], mamba_n_groups=2),
    "granitemoehybrid": dict(
        _ATTENTION, **_MAMBA2, num_hidden_layers=2, layer_types=["mamba", "attention"], mamba_n_groups=1,
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32, logits_scaling=3.0,
    ),
    "falcon_h1": dict(
        _ATTENTION, **_MAMBA2, num_hidden_layers=2, head_dim=8, mamba_d_ssm=64, mamba_n_groups=1, lm_head_multiplier=0.5
    ),
    "zamba2": dict(
        _ATTENTION, num_hidden_layers=3, layers_block_type=["mamba", "mamba", "hybrid"], mamba_d_state=8,
        mamba_ngroups=2, mamba_expand=2, n_mamba_heads=4, mamba_headdim=16, chunk_size=8, num_mem_blocks=1,
        adapter_rank=4, use_shared_attention_adapter=False,
    ),
    "nemotron_h": dict(
        _ATTENTION, num_hidden_layers=3, hybrid_override_pattern="M*-", mamba_num_heads=4, mamba_head_dim=16,
        n_groups=2, ssm_state_size=8, expand=2, chunk_size=8, head_dim=8,
    ),
    "qwen3_next": dict(
        _ATTENTION, **_DELTA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "qwen3_5_text": dict(_ATTENTION, **_DELTA, head_dim=8),
    "olmo_hybrid": dict(_ATTENTION, **_DELTA),
    "kimi_linear": dict(
        _ATTENTION, num_hidden_layers=2, layer_types=_LINEAR, linear_head_dim=8, linear_num_heads=4, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, moe_intermediate_size=16, n_shared_experts=1,
        num_local_experts=4, num_experts_per_tok=2, mlp_layer_types=["dense", "sparse"],
    ),
    "lfm2": dict(_ATTENTION, num_hidden_layers=2, conv_L_cache=3, layer_types=["conv", "full_attention"]),
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "jamba": dict(
        _ATTENTION, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        mamba_d_state=4, expert_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_conv=4, mamba_expand=2,
        mamba_dt_rank=4,
    ),
}  # fmt: skip
_EAGER = {"mamba2", "mamba", "falcon_mamba"}  # transformers has no SDPA for models without attention
FAMILIES = list(_FAMILIES)


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model in eval mode: decays spread out, logits far from uniform, EOS reached now and then."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **_FAMILIES[family])
    config._attn_implementation = "eager" if family in _EAGER else "sdpa"
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
