"""EagleDraft: a fusion layer and one decoder layer that extrapolate the target's features.

EAGLE (arXiv 2401.15077) for the architecture, HASS (arXiv 2408.15766) for the aligned training form. Row t reads the
feature of token t and the embedding of token t + 1 and predicts the feature of token t + 1, whose logits, by the
target's own head, are those of token t + 2.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.models.draft_state import DraftState
from draftwood.models.harmony import harmonized_attention
from draftwood.models.layers import DraftLayer, LayerShape, RMSNorm

if TYPE_CHECKING:
    from draftwood.models.target import Target


@dataclass(frozen=True)
class EagleConfig:
    """What a checkpoint needs to rebuild the draft, besides its weights."""

    shape: LayerShape
    num_layers: int = 1
    norms: bool = True
    fusion_bias: bool = False
    max_length: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EagleConfig":
        """Raises:
        ValueError: a field this version does not know, so could not honour, or one that is missing.
        """
        try:
            return cls(**{**values, "shape": LayerShape(**values["shape"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"the draft's config {values} is not one this version can honour: {error}") from None


class EagleDraft(nn.Module):
    """A draft over a target's features; its parameters are its own, embedding and head are the target's.

    Attributes:
        draft_vocab: [Vd] int64, the target's token of each draft logit; None where it has the target's vocabulary.
    """

    kind = "eagle"
    draft_vocab: Tensor | None

    def __init__(self, config: EagleConfig, target: "Target", draft_vocab: Tensor | None = None):
        super().__init__()
        shape = config.shape
        if shape.hidden_dim != target.hidden_dim:
            raise ValueError(f"the draft's hidden width is {shape.hidden_dim}, the target's {target.hidden_dim}")
        self.config = config
        self._target = (target,)  # in a tuple, so that the target's modules are not the draft's
        self.fc = nn.Linear(2 * shape.hidden_dim, shape.hidden_dim, bias=config.fusion_bias)
        self.layers = nn.ModuleList(DraftLayer(shape, config.norms or i > 0) for i in range(config.num_layers))
        if config.norms:
            self.embedding_norm = RMSNorm(shape.hidden_dim, shape.norm_eps)
            self.feature_norm = RMSNorm(shape.hidden_dim, shape.norm_eps)
            self.norm = RMSNorm(shape.hidden_dim, shape.norm_eps)
        self.register_buffer("draft_vocab", draft_vocab, persistent=draft_vocab is not None)
        self._head_rows: tuple[tuple[int, int], Tensor] | None = None

    @classmethod
    def from_target(
        cls,
        target: "Target",
        *,
        draft_vocab: Tensor | None = None,
        num_layers: int = 1,
        norms: bool = True,
        fusion_bias: bool = False,
    ) -> "EagleDraft":
        """An untrained draft shaped like one of the target's layers, on its device, in float32.

        Args:
            draft_vocab: [Vd] int64 token ids the draft can propose; None is the target's whole vocabulary.
            norms: norms on both fusion inputs, before attention and on the output; False is the published layout.
        """
        config = EagleConfig(_shape_of(target), num_layers, norms, fusion_bias, _max_length(target))
        vocab = None if draft_vocab is None else draft_vocab.to(torch.int64).sort().values
        draft = cls(config, target, vocab)
        for module in draft.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if norms:
            weight = getattr(target.final_norm, "weight", None)
            if weight is not None:  # predicted features get the scale of the target's from the start
                draft.norm.weight.data.copy_(weight.float())
        return draft.to(target.device)

    @property
    def target(self) -> "Target":
        return self._target[0]

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], list(self.layers))

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def max_length(self) -> int | None:
        """Positions beyond which the draft was not made to work; None where the target states no limit."""
        return self.config.max_length

    def forward(self, features: Tensor, next_ids: Tensor, cache: DraftState | None = None) -> tuple[Tensor, DraftState]:
        """Decode-time call: predicted features [B, t, H] of rows (features [B, t, H], next_ids [B, t]).

        `cache` holds the rows before; it is extended in place and returned.
        """
        cache = cache or self.new_state(features.shape[0])
        return self.extend(cache, features, next_ids), cache

    def new_state(self, batch_size: int) -> DraftState:
        return DraftState(batch_size, self.config.num_layers)

    def extend(self, state: DraftState, features: Tensor, next_ids: Tensor, counts: list[int] | None = None) -> Tensor:
        """Commits rows of target features and returns predicted features [B, t, H].

        Args:
            state: extended in place.
            features: [B, t, H]; counts: rows of each batch row that are real, the first ones (default all).
            next_ids: [B, t] int64, the token after each feature's.
        """
        self.reset_tree(state)
        rows, device = features.shape[1], features.device
        mask = None
        if state.width:
            causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
            mask = state.mask_for(causal[None], device)
        positions = torch.tensor(state.lengths, device=device)[:, None] + torch.arange(rows, device=device)
        out = self._run(state, features, next_ids, positions, mask)
        state.commit(rows, counts if counts is not None else [rows] * len(state.lengths))
        return out

    def expand(self, state: DraftState, features: Tensor, ids: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        """Adds tree nodes of one depth, not committed, and returns predicted features [B, m, H].

        Args:
            features: [B, m, H], the draft's own outputs at the parents.
            ids: [B, m] int64, the nodes' tokens; depth: 1 for the root's children.
            ancestors: [B or 1, m, total] bool over all nodes added since `reset_tree`, these last, itself included.
        """
        mask = state.mask_for(ancestors, features.device)
        # The root's own row is the last committed one, so depth 1 comes right behind.
        positions = torch.tensor(state.lengths, device=features.device)[:, None] + (depth - 1)
        out = self._run(state, features, ids, positions.expand(-1, ids.shape[1]), mask)
        state.num_nodes += ids.shape[1]
        return out

    def reset_tree(self, state: DraftState) -> None:
        """Forgets the nodes of the last tree."""
        state.num_nodes = 0

    def _run(self, state: DraftState, features: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self._fuse(features, self.target.embed(ids))
        for index, layer in enumerate(self.decoder_layers):
            q, k, v = layer.queries_keys_values(x, layer.self_attn.rotary(positions))
            x = layer.finish(x, state.attend(index, q, k, v, mask))
        return self._output(x)

    def align(self, features: Tensor, next_ids: Tensor, steps: int = 3) -> list[Tensor]:
        """Training form: predicted features of align steps 1 to `steps`, each [B, T, H].

        Row t of step j is what `forward` gives after reading target features up to t - (j - 1) and then its own
        features for j - 1 steps. Step inputs are detached; padding on the right changes no row before it.
        """
        embeddings = self.target.embed(next_ids)
        positions = torch.arange(features.shape[1], device=features.device)[None]
        keys: list[list[Tensor]] = [[] for _ in self.layers]
        values: list[list[Tensor]] = [[] for _ in self.layers]
        stream, outputs = features, []
        for _ in range(steps):
            x = self._fuse(stream, embeddings)
            for index, layer in enumerate(self.decoder_layers):
                q, k, v = layer.queries_keys_values(x, layer.self_attn.rotary(positions))
                keys[index].append(k)
                values[index].append(v)
                x = layer.finish(x, harmonized_attention(q, keys[index], values[index]))
            outputs.append(self._output(x))
            # the feature of token t is what row t - 1 predicted
            stream = torch.cat([features[:, :1], outputs[-1][:, :-1].detach().to(features.dtype)], 1)
        return outputs

    def _fuse(self, features: Tensor, embeddings: Tensor) -> Tensor:
        features, embeddings = features.to(self.dtype), embeddings.to(self.dtype)
        if self.config.norms:
            features, embeddings = self.feature_norm(features), self.embedding_norm(embeddings)
        return self.fc(torch.cat([embeddings, features], -1))

    def _output(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.config.norms else x

    @property
    def head_weight(self) -> Tensor:
        """[Vd, H] rows of the target's head in draft-vocabulary order."""
        weight = self.target.head_weight
        if self.draft_vocab is None:
            return weight
        version = (weight.data_ptr(), weight._version)
        if self._head_rows is None or self._head_rows[0] != version:
            self._head_rows = (version, weight[self.draft_vocab])
        return self._head_rows[1]

    def logits(self, predicted: Tensor) -> Tensor:
        """Logits [..., Vd] of predicted features [..., H], by the target's head over the draft vocabulary."""
        weight = self.head_weight
        return F.linear(predicted.to(weight.dtype), weight) * self.target.logit_scale


def _shape_of(target: "Target") -> LayerShape:
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


def _max_length(target: "Target") -> int | None:
    return getattr(target.config.get_text_config(), "max_position_embeddings", None)
