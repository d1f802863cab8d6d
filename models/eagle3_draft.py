"""Eagle3Draft: three hidden states of the target, fused; one layer over embedding and hidden state; a head of its own.

EAGLE-3 (arXiv 2503.01840). It predicts no features: its own hidden state is what it reads on, and training goes through
the align steps ("training-time test"), so an align step's input carries gradient. Parameters are named as published.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from draftwood.models.draft import layer_shape, max_length
from draftwood.models.draft_attention import AttentionDraft, AttentionLayer, Rotary
from draftwood.models.draft_base import DraftConfig, draw_linear_weights, sorted_vocab, take_scale
from draftwood.models.layers import Attention, FeedForward, LayerShape, RMSNorm

if TYPE_CHECKING:
    from draftwood.models.target import Target


@dataclass(frozen=True)
class Eagle3Config(DraftConfig):
    """`DraftConfig` and the target's layers whose inputs the draft reads, ascending."""

    taps: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return super().from_dict({**values, "taps": tuple(values.get("taps", ()))})


class MidLayer(nn.Module):
    """A decoder layer over rows [embedding, hidden state], 2 H wide, whose residual is the hidden state alone."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.hidden_dim = shape.hidden_dim
        self.self_attn = Attention(shape, 2 * shape.hidden_dim)
        self.mlp = FeedForward(shape.hidden_dim, shape.intermediate_dim)
        self.input_layernorm = RMSNorm(shape.hidden_dim, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_dim, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_dim, shape.norm_eps)

    def rotary(self, positions: Tensor) -> Rotary:
        return self.self_attn.rotary(positions)

    def queries_keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        embedding, hidden = x.split(self.hidden_dim, -1)
        normed = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)
        return self.self_attn.project(normed, rotary)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output [B, t, D] from the layer's input and the attended values [B, Hq, t, Dh]."""
        hidden = x[..., self.hidden_dim :] + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Draft(AttentionDraft):
    """Loading or making one taps its target, whose features are wider from then on: [.., (k + 1) H]."""

    kind = "eagle3"
    config_type = Eagle3Config
    option_names = ("taps",)
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, target: "Target", draft_vocab: Tensor | None = None):
        super().__init__(config, target, draft_vocab)
        target.tap(config.taps)
        self.detaches = False
        shape = config.shape
        self.fc = nn.Linear(len(config.taps) * shape.hidden_dim, shape.hidden_dim, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_dim, shape.norm_eps)
        size = target.vocab_size if draft_vocab is None else len(draft_vocab)
        self.lm_head = nn.Linear(shape.hidden_dim, size, bias=False)

    @classmethod
    def from_target(
        cls, target: "Target", *, draft_vocab: Tensor | None = None, taps: tuple[int, ...] | None = None
    ) -> "Eagle3Draft":
        """An untrained draft, in float32, its head a copy of the target's.

        Args:
            draft_vocab: [Vd] int64 token ids the draft can propose; None is the target's whole vocabulary.
            taps: the layers whose inputs it reads, ascending; None: a low, a middle and a high one, as published.
        """
        cls.prepare_target(target, taps=taps)
        vocab = sorted_vocab(draft_vocab)
        config = Eagle3Config(layer_shape(target), max_length=max_length(target), taps=target.taps)
        draft = cls(config, target, vocab)
        draw_linear_weights(draft)
        take_scale(draft.norm, target)
        with torch.no_grad():
            head = target.head_weight if vocab is None else target.head_weight[vocab]
            draft.lm_head.weight.copy_(head.float() * target.logit_scale)
        return draft.to(target.device)

    @classmethod
    def prepare_target(cls, target: "Target", **options: Any) -> None:
        target.tap(options["taps"] or default_taps(target.num_layers))

    @property
    def decoder_layers(self) -> list[AttentionLayer]:
        return [self.midlayer]

    def read(self, features: Tensor) -> Tensor:
        """The fused hidden states [.., H] of the target's features, or its own hidden states [.., H] as they are."""
        width, hidden, expected = features.shape[-1], self.config.shape.hidden_dim, self.target.feature_dim
        if width == hidden:
            return features
        if width != expected:
            raise ValueError(
                f"features are {width} wide; expected {expected}, of a target tapped at layers "
                f"{list(self.config.taps)}, or the draft's own, {hidden}"
            )
        return self.fc(features[..., :-hidden].to(self.dtype))

    def fuse(self, stream: Tensor, embeddings: Tensor) -> Tensor:
        return torch.cat([embeddings.to(self.dtype), stream.to(self.dtype)], -1)

    def output(self, x: Tensor) -> Tensor:
        return x

    def head_input(self, predicted: Tensor) -> Tensor:
        return self.norm(predicted)

    @property
    def own_head(self) -> Tensor:
        return self.lm_head.weight

    @property
    def head_weight(self) -> Tensor:
        """[Vd, H], the draft's own."""
        return self.lm_head.weight

    @property
    def logit_scale(self) -> float:
        return 1.0


def default_taps(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer: 2, L / 2 and L - 3 as published, quarters of a target too small for that."""
    published = (2, num_layers // 2, num_layers - 3)
    quarters = sorted({num_layers // 4, num_layers // 2, 3 * num_layers // 4})
    return published if num_layers > 7 else tuple(quarters)
