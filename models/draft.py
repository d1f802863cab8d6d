"""EagleDraft: a fusion layer and attention layers that extrapolate the target's features.

EAGLE (arXiv 2401.15077) for the architecture, HASS (arXiv 2408.15766) for the aligned training form.
"""

from typing import TYPE_CHECKING, cast

from torch import Tensor

from draftwood.models.draft_attention import AttentionDraft, AttentionLayer
from draftwood.models.draft_fusion import FusionConfig, FusionDraft, Norms
from draftwood.models.draft_state import DraftState
from draftwood.models.layers import DraftLayer, LayerShape

if TYPE_CHECKING:
    from draftwood.models.target import Target


class EagleDraft(FusionDraft[DraftState], AttentionDraft):
    """Fusion of feature and embedding, then decoder layers of Llama's kind."""

    kind = "eagle"
    make_layer = staticmethod(DraftLayer)

    @classmethod
    def from_target(
        cls,
        target: "Target",
        *,
        draft_vocab: Tensor | None = None,
        num_layers: int = 1,
        norms: Norms = "all",
        fusion_bias: bool = False,
    ) -> "EagleDraft":
        """An untrained draft shaped like one of the target's layers, on its device, in float32.

        Args:
            draft_vocab: [Vd] int64 token ids the draft can propose; None is the target's whole vocabulary.
            norms: `none` (the published layout), `input` or `all`, as in `FusionConfig`.
        """
        config = FusionConfig(layer_shape(target), num_layers, max_length(target), norms, fusion_bias)
        return cls.untrained(config, target, draft_vocab)

    @property
    def decoder_layers(self) -> list[AttentionLayer]:
        return cast(list[AttentionLayer], list(self.layers))


def layer_shape(target: "Target") -> LayerShape:
    """Sizes of a decoder layer like the target's."""
    config, hidden = target.config.get_text_config(), target.hidden_dim
    heads = getattr(config, "num_attention_heads", None)
    if not heads:  # a pure state-space target has no attention to copy the shape of
        heads = max(1, hidden // 64) if hidden % 64 == 0 and hidden >= 256 else 4
        kv_heads, head_dim = heads, hidden // heads
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
    intermediate = getattr(config, "intermediate_size", None) or hidden * 8 // 3
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    eps = getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_epsilon", None) or 1e-6
    return LayerShape(hidden, heads, kv_heads, head_dim, intermediate, float(theta), float(eps))


def max_length(target: "Target") -> int | None:
    """Positions the target was made for; None where it states no limit."""
    return getattr(target.config.get_text_config(), "max_position_embeddings", None)
