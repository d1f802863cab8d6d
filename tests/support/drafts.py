"""Tiny drafts of every kind, and their outputs by the plainest means: whole sequences, full scores, a recurrence."""

import functools
import math

import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import draftwood as dw
from draftwood.models.draft_kinds import KINDS

VARIANTS = [
    {"kind": "eagle"},
    {"kind": "eagle", "norms": "none"},
    {"kind": "eagle", "norms": "input"},
    {"kind": "eagle", "num_layers": 2},
    {"kind": "eagle", "fusion_bias": True},
    {"kind": "eagle3"},
    {"kind": "mamba"},
    {"kind": "mamba", "norms": "none"},
    {"kind": "mamba", "norms": "input"},
    {"kind": "mamba", "num_layers": 2},
    {"kind": "mamba", "fusion_bias": True},
]


@functools.cache
def _tapped(family: str):
    """A target of its own: an EAGLE-3 draft makes the features of its target wider."""
    return dw.load_target(tiny.build(family))


def make_draft(family: str = "bamba", seed: int = 0, kind: str = "eagle", **options):
    """An untrained draft with weights large enough to matter, in eval mode."""
    torch.manual_seed(seed)
    if kind == "mamba":
        options.setdefault("state_dim", 8)
    target = _tapped(family) if kind == "eagle3" else tiny.target(family)
    draft = KINDS[kind].from_target(target, **options).eval()
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.ndim == 2 and name != "lm_head.weight":
                parameter.mul_(1.5)
            elif name.endswith(("dt_bias", "fc.bias", "mamba.D")):
                parameter.uniform_(-2.0, 1.0)
    return draft


def rows_of(draft, batch: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random features and next ids; what is claimed must hold for any."""
    torch.manual_seed(seed)
    return torch.randn(batch, length, draft.target.feature_dim), tiny.prompt_ids((batch, length), seed)


def plain_outputs(draft, stream: Tensor, ids: Tensor) -> Tensor:
    """Outputs [B, T, H] of a sequence of rows from the start."""
    x = draft.fuse(stream, draft.target.embed(ids))
    for layer in [draft.midlayer] if draft.kind == "eagle3" else draft.layers:
        x = (
            layer(x, lambda h, m=layer.mamba: _plain_mixer(m, h))
            if draft.kind == "mamba"
            else _plain_attention(layer, x)
        )
    return draft.output(x)


def _plain_attention(layer: nn.Module, x: Tensor) -> Tensor:
    length = x.shape[1]
    q, k, v = layer.queries_keys_values(x, layer.rotary(torch.arange(length)[None]))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    return layer.finish(x, scores.softmax(-1) @ v)


def _plain_mixer(mixer: nn.Module, hidden: Tensor) -> Tensor:
    """Mamba-2 as published: a recurrence over the rows."""
    shape, length = mixer.shape, hidden.shape[1]
    sizes = [shape.inner_dim, shape.conv_dim, shape.num_heads]
    gate, inputs, dt = mixer.in_proj(hidden).split(sizes, -1)
    padded = F.pad(inputs.transpose(1, 2), (shape.conv_width - 1, 0))
    convolved = F.conv1d(padded, mixer.conv1d.weight, mixer.conv1d.bias, groups=shape.conv_dim)
    width = shape.num_groups * shape.state_dim
    x, B, C = F.silu(convolved).transpose(1, 2).split([shape.inner_dim, width, width], -1)
    x = x.unflatten(-1, (shape.num_heads, shape.head_dim))
    repeats = shape.num_heads // shape.num_groups
    B, C = (t.unflatten(-1, (-1, shape.state_dim)).repeat_interleave(repeats, 2) for t in (B, C))
    dt, A = F.softplus(dt + mixer.dt_bias), -torch.exp(mixer.A_log)
    state, outputs = torch.zeros(*x.shape[:1], *x.shape[2:], shape.state_dim, dtype=x.dtype), []
    for t in range(length):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + dt[:, t, :, None, None] * x[:, t, :, :, None] * B[:, t, :, None, :]
        outputs.append((state * C[:, t, :, None, :]).sum(-1) + mixer.D[:, None] * x[:, t])
    y = torch.stack(outputs, 1).flatten(2)
    return mixer.out_proj(mixer.norm(y * F.silu(gate)))
