"""Llama-style models made hybrid: some attention layers become Mamba-2 mixers that start from their q, k, v and o.

The result is an ordinary `BambaForCausalLM`. As in MambaInLlama (arXiv 2408.15237), Q goes to C, K to B, V to x and O
to the output projection: without its softmax, attention is the scan with decays.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BambaConfig, BambaForCausalLM
from transformers.models.bamba import modeling_bamba

from draftwood.kernels.chunk_scan import chunk_scan
from draftwood.kernels.decay import discretize

# Models, attention layers and mixers are transformers' own classes, whose attributes type checkers can't follow: Any.
# Inputs of the convolution's SiLU are made this small, where it is close to x / 2.
_LINEAR_RANGE = 0.3
_RENAMED = {
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    ".mlp.": ".feed_forward.",
    "model.norm.": "model.final_layernorm.",
}


def hybrid_config(config: Any, mamba_layers: Sequence[int]) -> BambaConfig:
    """The Bamba configuration of Llama-style `config` with Mamba-2 in `mamba_layers`, one head per attention head.

    Raises:
        ValueError: layers that are not there or all of them, or an architecture Bamba does not cover.
    """
    layers = set(mamba_layers)
    count = config.num_hidden_layers
    if not layers or not layers < set(range(count)):
        raise ValueError(f"layers {sorted(layers)}: expected some, not all, of 0 to {count - 1}")
    if config.model_type != "llama":
        raise ValueError(f"a {config.model_type} model cannot be made a hybrid; expected a llama-style one")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(f"heads of {head_dim} do not make up the hidden width {config.hidden_size}")
    return BambaConfig(
        **{
            name: getattr(config, name)
            for name in (
                "vocab_size",
                "tie_word_embeddings",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "hidden_act",
                "rms_norm_eps",
                "pad_token_id",
                "bos_token_id",
                "eos_token_id",
                "max_position_embeddings",
                "attention_bias",
                "mlp_bias",
            )
        },
        attn_layer_indices=[i for i in range(count) if i not in layers],
        rope_parameters={**config.rope_parameters, "partial_rotary_factor": 1.0},
        mamba_n_heads=config.num_attention_heads,
        mamba_d_head=head_dim,
        mamba_n_groups=config.num_attention_heads,
        mamba_d_state=head_dim,
        mamba_expand=1,
        mamba_proj_bias=True,  # so that the gate can begin open
    )


def build_hybrid(model: Any, mixers: Mapping[int, Mapping[str, Tensor]]) -> BambaForCausalLM:
    """A float32 hybrid of Llama-style `model` on the CPU: its weights, and the state of a mixer for some layers.

    Raises:
        ValueError: as `hybrid_config`.
    """
    hybrid = BambaForCausalLM(hybrid_config(model.config, list(mixers))).float().eval()
    renamed = {}
    for name, weight in model.state_dict().items():
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = weight.detach().float().cpu()
    for layer, state in mixers.items():
        renamed |= {f"model.layers.{layer}.mamba.{name}": w.detach().float().cpu() for name, w in state.items()}
    own = hybrid.state_dict()
    hybrid.load_state_dict({name: renamed[name] for name in own})
    hybrid.generation_config = model.generation_config
    return hybrid


def mixer_for(model: Any, layer: int) -> Any:
    """A float32 mixer that starts from attention layer `layer` of Llama-style `model`, on the CPU."""
    mixer = modeling_bamba.BambaMixer(hybrid_config(model.config, [layer]), layer).float()
    initialise_mixer(mixer, model.model.layers[layer].self_attn)
    return mixer


@torch.no_grad()
def initialise_mixer(mixer: Any, attention: Any) -> None:
    """Q to C, K to B, V to x, O to the output; the convolution passes its input, decays span 2 to 500 tokens."""
    q, k, v, o = (getattr(attention, f"{n}_proj").weight.detach().float().cpu() for n in "qkvo")
    heads, width = mixer.num_heads, mixer.head_dim
    k, v = (w.unflatten(0, (-1, width)).repeat_interleave(heads // (len(w) // width), 0).flatten(0, 1) for w in (k, v))
    x, B, C = (w * (_LINEAR_RANGE / w.pow(2).sum(1).mean().sqrt()) for w in (v, k, q))
    inner, state = mixer.intermediate_size, B.shape[0]
    weight = mixer.in_proj.weight
    mixer.in_proj.bias.zero_()
    mixer.out_proj.bias.zero_()
    mixer.in_proj.bias[:inner] = 1.28  # the gate, SiLU(1.28) = 1
    weight[:inner].normal_(std=0.1 * weight.shape[1] ** -0.5)
    weight[inner : 2 * inner] = x
    weight[2 * inner : 2 * inner + state] = B
    weight[2 * inner + state : 2 * inner + 2 * state] = C
    weight[2 * inner + 2 * state :].normal_(std=0.1 * weight.shape[1] ** -0.5)  # the step sizes
    mixer.conv1d.weight.zero_()
    mixer.conv1d.weight[:, :, -1] = 1
    mixer.conv1d.bias.zero_()
    mixer.dt_bias.fill_(torch.log(torch.expm1(torch.tensor(0.5))))
    # A head forgets half of its state in so many tokens.
    half_lives = torch.logspace(1, 9, heads, base=2)
    mixer.A_log.copy_(torch.log(torch.log(torch.tensor(2.0)) / half_lives / 0.5))
    mixer.D.zero_()
    mixer.norm.weight.fill_(1)
    mixer.out_proj.weight.copy_(o)


@contextmanager
def matrix_scan() -> Iterator[None]:
    """Within this context Bamba's mixers use `chunk_scan` and a shifted sum: the same values, faster to train."""
    saved = modeling_bamba.mamba2_chunk_scan, modeling_bamba.causal_conv1d_fn
    modeling_bamba.mamba2_chunk_scan, modeling_bamba.causal_conv1d_fn = _scan, _conv
    try:
        yield
    finally:
        modeling_bamba.mamba2_chunk_scan, modeling_bamba.causal_conv1d_fn = saved


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    **_: Any,
) -> Tensor:
    return chunk_scan(hidden_states, discretize(dt, dt_bias, True, dt_limit), A, B, C, D)


def _conv(hidden_states: Tensor, weight: Tensor, bias: Tensor, activation: str, **_: Any) -> Tensor:
    width, tokens = weight.shape[1], hidden_states.shape[-1]
    rows = F.pad(hidden_states.transpose(1, 2), (0, 0, width - 1, 0))
    taps = weight.to(rows.dtype)
    out = sum((rows[:, i : i + tokens] * taps[:, i] for i in range(width)), bias.to(rows.dtype))
    return F.silu(out).transpose(1, 2)


@torch.no_grad()
def initialise_scale(mixer: Any, x: Tensor, y: Tensor) -> None:
    """Scales the mixer's output: on inputs `x` as near to `y`, both [B, T, H], as one factor gets it."""
    out = mixer(x).float()
    mixer.norm.weight.mul_(((out * y.float()).sum() / out.square().sum()).abs())


class AttentionTaps:
    """Inputs and outputs, each [B, T, H], of a model's attention `layers` while it runs within `caught`."""

    def __init__(self, model: Any, layers: Sequence[int]):
        self.attentions = [model.model.layers[i].self_attn for i in layers]
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        def catch(_: nn.Module, args: Any, kwargs: dict[str, Any], out: tuple[Tensor, Any]) -> None:
            self.inputs.append(kwargs["hidden_states"])
            self.outputs.append(out[0])

        self.inputs, self.outputs = [], []
        handles = [a.register_forward_hook(catch, with_kwargs=True) for a in self.attentions]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def replaced(attention: Any, mixer: Any) -> Iterator[None]:
    """Within this context attention layer `attention` gives what `mixer` does."""

    def give(_: nn.Module, args: Any, kwargs: dict[str, Any], out: tuple[Tensor, Any]) -> tuple[Tensor, None]:
        x = kwargs["hidden_states"]
        return mixer(x).to(x.dtype), None

    handle = attention.register_forward_hook(give, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
