"""Fusion of a feature and the next token's embedding, ahead of a stack of decoder layers of any kind (EAGLE)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from draftwood.models.draft_base import Draft, DraftConfig, State, draw_linear_weights, sorted_vocab, take_scale
from draftwood.models.layers import RMSNorm

if TYPE_CHECKING:
    from draftwood.models.target import Target


Norms = Literal["none", "input", "all"]


@dataclass(frozen=True)
class FusionConfig(DraftConfig):
    """`DraftConfig` and how the inputs are fused.

    Attributes:
        norms: `none` is the published EAGLE layout; `input` normalises both inputs of the fusion; `all` also the input
            of the first layer and the output.
    """

    norms: Norms = "all"
    fusion_bias: bool = False

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        if isinstance(values.get("norms"), bool):  # as the first versions wrote it
            values = {**values, "norms": "all" if values["norms"] else "none"}
        return super().from_dict(values)


class FusionDraft(Draft[State]):
    """A linear layer over [embedding, feature], then layers, then (norms: all) a norm with the scale of the target's.

    `make_layer(shape, input_norm)` is what a subclass stacks.
    """

    config_type = FusionConfig
    option_names: ClassVar[tuple[str, ...]] = ("num_layers", "norms", "fusion_bias")

    def __init__(self, config: FusionConfig, target: "Target", draft_vocab: Tensor | None = None):
        super().__init__(config, target, draft_vocab)
        shape = config.shape
        self.fc = nn.Linear(2 * shape.hidden_dim, shape.hidden_dim, bias=config.fusion_bias)
        is_normed = config.norms == "all"
        self.layers = nn.ModuleList(self.make_layer(shape, is_normed or i > 0) for i in range(config.num_layers))
        if config.norms != "none":
            self.embedding_norm = RMSNorm(shape.hidden_dim, shape.norm_eps)
            self.feature_norm = RMSNorm(shape.hidden_dim, shape.norm_eps)
        if is_normed:
            self.norm = RMSNorm(shape.hidden_dim, shape.norm_eps)

    @staticmethod
    def make_layer(shape: Any, input_norm: bool) -> nn.Module:
        raise NotImplementedError

    @classmethod
    def untrained(cls, config: FusionConfig, target: "Target", draft_vocab: Tensor | None) -> Self:
        """With fresh weights in float32, on the target's device."""
        draft = cls(config, target, sorted_vocab(draft_vocab))
        draw_linear_weights(draft)
        if config.norms == "all":
            take_scale(draft.norm, target)
        return draft.to(target.device)

    def fuse(self, stream: Tensor, embeddings: Tensor) -> Tensor:
        stream, embeddings = stream.to(self.dtype), embeddings.to(self.dtype)
        if self.config.norms != "none":
            stream, embeddings = self.feature_norm(stream), self.embedding_norm(embeddings)
        return self.fc(torch.cat([embeddings, stream], -1))

    def output(self, x: Tensor) -> Tensor:
        """Predicted features from the last layer's output."""
        return self.norm(x) if self.config.norms == "all" else x
