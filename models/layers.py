"""The draft's decoder layer: Llama's, split where the two ways of attending (tree cache, align steps) differ."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a draft's decoder layer, saved with its checkpoint."""

    hidden_dim: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


class RMSNorm(nn.RMSNorm):
    """torch's, in the dtype of its weight: under autocast the input is narrower, for which torch has no fused path."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Projections and rotary positions; the scores are the caller's business."""

    def __init__(self, shape: LayerShape, input_dim: int):
        super().__init__()
        self.shape = shape
        width, key_width = shape.num_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(input_dim, width, bias=False)
        self.k_proj = nn.Linear(input_dim, key_width, bias=False)
        self.v_proj = nn.Linear(input_dim, key_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_dim, bias=False)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [B or 1, 1, t, Dh] float32, at `positions` [B or 1, t]."""
        # Made anew rather than kept as a buffer: casting the module to bf16 would round the frequencies.
        exponents = torch.arange(0, self.shape.head_dim, 2, device=positions.device, dtype=torch.float32)
        angles = positions[..., None].float() * self.shape.rope_theta ** (-exponents / self.shape.head_dim)
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos(), angles.sin()

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, Hq, t, Dh], rotated keys and values [B, Hkv, t, Dh] of inputs [B, t, D]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return _rotate(q, rotary), _rotate(k, rotary), v


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = precise.chunk(2, -1)
    return (precise * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, hidden_dim: int, intermediate_dim: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_dim, intermediate_dim, bias=False)
        self.up_proj = nn.Linear(hidden_dim, intermediate_dim, bias=False)
        self.down_proj = nn.Linear(intermediate_dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm decoder layer; without `input_norm` it is the published EAGLE layout.

    A caller runs `queries_keys_values`, attends as it must, and hands the result to `finish`.
    """

    def __init__(self, shape: LayerShape, input_norm: bool):
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_dim)
        self.mlp = FeedForward(shape.hidden_dim, shape.intermediate_dim)
        self.input_layernorm = RMSNorm(shape.hidden_dim, shape.norm_eps) if input_norm else None
        self.post_attention_layernorm = RMSNorm(shape.hidden_dim, shape.norm_eps)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.self_attn.rotary(positions)

    def queries_keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(x if self.input_layernorm is None else self.input_layernorm(x), rotary)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output [B, t, D] from the layer's input and the attended values [B, Hq, t, Dh]."""
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))
