"""MambaDraft: fusion of feature and embedding, then Mamba-2 layers, so that a draft's cost does not grow with context.

The state after the committed rows is all that decoding carries. Tree nodes are scanned along their paths from it, by
the target's own tree operators, and forgotten; what is accepted is read anew, from the target's features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.kernels.tables import TreeTables, newest_ancestors
from draftwood.models.draft import layer_shape
from draftwood.models.draft_base import AlignStep
from draftwood.models.draft_fusion import FusionConfig, FusionDraft, Norms
from draftwood.models.mamba_layer import MambaLayer, MambaShape, MixerState
from draftwood.models.transfer import send

if TYPE_CHECKING:
    from draftwood.models.target import Target


@dataclass(frozen=True)
class MambaConfig(FusionConfig):
    """`FusionConfig` with the sizes of Mamba-2 layers."""

    shape_type: ClassVar[type] = MambaShape


@dataclass
class MambaState:
    """Attributes:
    mixers: what each layer carries.
    tables: the tree nodes drafted since, a forest below the committed rows; None where there are none.
    """

    mixers: list[MixerState]
    tables: TreeTables | None = None


class MambaDraft(FusionDraft[MambaState]):
    """As `EagleDraft`, its attention layers replaced by Mamba-2 layers of about the same size."""

    kind = "mamba"
    config_type = MambaConfig
    option_names = (*FusionDraft.option_names, "state_dim")
    make_layer = staticmethod(MambaLayer)

    @classmethod
    def from_target(
        cls,
        target: "Target",
        *,
        draft_vocab: Tensor | None = None,
        num_layers: int = 1,
        norms: Norms = "all",
        fusion_bias: bool = False,
        state_dim: int = 64,
        conv_width: int = 4,
    ) -> "MambaDraft":
        """An untrained draft as wide as the target, on its device, in float32.

        Args:
            draft_vocab: [Vd] int64 token ids the draft can propose; None is the target's whole vocabulary.
            norms: `none`, `input` or `all`, as in `FusionConfig`.
            state_dim: width of the recurrent state; conv_width: taps of the short convolution, 2 or more.
        """
        like = layer_shape(target)
        hidden = like.hidden_dim
        head_dim = next(width for width in (64, 32, 16, 8, 4, 2, 1) if hidden % width == 0 and hidden >= 4 * width)
        sizes = (hidden, hidden // head_dim, head_dim, state_dim, 1, conv_width, like.intermediate_dim, like.norm_eps)
        config = MambaConfig(MambaShape(*sizes), num_layers, norms=norms, fusion_bias=fusion_bias)
        return cls.untrained(config, target, draft_vocab)

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "state_dim": self.config.shape.state_dim}

    @property
    def mamba_layers(self) -> list[MambaLayer]:
        return cast(list[MambaLayer], list(self.layers))

    def new_state(self, batch_size: int) -> MambaState:
        return MambaState([layer.mamba.new_state(batch_size) for layer in self.mamba_layers])

    def extend(self, state: MambaState, features: Tensor, next_ids: Tensor, counts: list[int] | None = None) -> Tensor:
        self.reset_tree(state)
        on_device = None if counts is None else send(counts, features.device)
        return self._run(
            [partial(layer.mamba.extend, state=mixer, counts=on_device) for layer, mixer in self._pairs(state)],
            self.fuse(self.read(features), self.target.embed(next_ids)),
        )

    def expand(self, state: MambaState, features: Tensor, ids: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        state.tables = tables = _grown(state.tables, ancestors, depth - 1)
        return self._run(
            [partial(layer.mamba.expand, state=mixer, tables=tables) for layer, mixer in self._pairs(state)],
            self.fuse(features, self.target.embed(ids)),
        )

    def reset_tree(self, state: MambaState) -> None:
        state.tables = None
        for mixer in state.mixers:
            mixer.inputs = mixer.steps = None

    def align_step(self, length: int, device: torch.device) -> AlignStep:
        mixers = [layer.mamba.align_step() for layer in self.mamba_layers]
        return lambda first, before, embeddings: self._run(mixers, self.fuse(self.stream(first, before), embeddings))

    def _pairs(self, state: MambaState) -> list[tuple[MambaLayer, MixerState]]:
        return list(zip(self.mamba_layers, state.mixers, strict=True))

    def _run(self, mixers: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
        for layer, mixer in zip(self.mamba_layers, mixers, strict=True):
            x = layer(x, mixer)
        return self.output(x)


def _grown(tables: TreeTables | None, ancestors: Tensor, depth: int) -> TreeTables:
    """`tables` with new nodes, all at `depth`, whose `ancestors` [R, m, total] are given, themselves included."""
    new = ancestors.shape[1]
    if tables is None:
        parents = torch.full(ancestors.shape[:2], -1, device=ancestors.device)
        return TreeTables(parents, ancestors, torch.full_like(parents, depth), depth)
    rows = max(len(ancestors), tables.num_rows)
    ancestors = ancestors.expand(rows, -1, -1)
    parents = newest_ancestors(ancestors[..., :-new]) - 1
    return TreeTables(
        torch.cat([tables.parents.expand(rows, -1), parents], 1),
        torch.cat([F.pad(tables.ancestors.expand(rows, -1, -1), (0, new)), ancestors], 1),
        torch.cat([tables.depth.expand(rows, -1), torch.full_like(parents, depth)], 1),
        depth,
    )
