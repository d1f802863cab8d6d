"""Medusa heads: each predicts one more token ahead from the same feature of the target (arXiv 2401.10774)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.models.draft import max_length
from draftwood.models.draft_base import AlignStep, Draft, DraftConfig, sorted_vocab
from draftwood.models.transfer import send

if TYPE_CHECKING:
    from draftwood.models.target import Target


@dataclass(frozen=True)
class MedusaShape:
    """A head is one square layer; there is no attention and no feed-forward layer."""

    hidden_dim: int

    intermediate_dim: ClassVar[int] = 0
    num_heads: ClassVar[int] = 0


@dataclass(frozen=True)
class MedusaConfig(DraftConfig):
    """`num_heads`: tokens predicted ahead, and so the deepest level of a tree."""

    num_heads: int = 4

    shape_type: ClassVar[type] = MedusaShape


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)); it starts as the identity."""

    def __init__(self, hidden_dim: int):
        super().__init__()
        self.linear = nn.Linear(hidden_dim, hidden_dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


@dataclass
class MedusaState:
    """`features` [B, H]: the target's at the last token committed in each row."""

    features: Tensor | None = None


class MedusaDraft(Draft[MedusaState]):
    """Head j of row t predicts the feature of token t + j, whose logits, by the target's head, are of token t + 1 + j.

    It reads no token, its own drafts least of all: the children of all nodes of one depth are the same tokens, a tree
    is a part of the Cartesian product of the heads' choices, and drafting is one small product per level. Published
    heads have output layers of their own; these share the target's, like every draft here.
    """

    kind = "medusa"
    config_type = MedusaConfig
    option_names = ("num_heads",)

    def __init__(self, config: MedusaConfig, target: "Target", draft_vocab: Tensor | None = None):
        super().__init__(config, target, draft_vocab)
        self.heads = nn.ModuleList(ResidualBlock(config.shape.hidden_dim) for _ in range(config.num_heads))

    @classmethod
    def from_target(cls, target: "Target", *, draft_vocab: Tensor | None = None, num_heads: int = 4) -> "MedusaDraft":
        """Untrained heads, on the target's device, in float32: each gives the target's feature back.

        Args:
            draft_vocab: [Vd] int64 token ids the draft can propose; None is the target's whole vocabulary.
        """
        config = MedusaConfig(MedusaShape(target.hidden_dim), max_length=max_length(target), num_heads=num_heads)
        return cls(config, target, sorted_vocab(draft_vocab)).to(target.device)

    @property
    def max_depth(self) -> int:
        """Levels of a tree that there are heads for."""
        return len(self.heads)

    def new_state(self, batch_size: int) -> MedusaState:
        return MedusaState()

    def extend(self, state: MedusaState, features: Tensor, next_ids: Tensor, counts: list[int] | None = None) -> Tensor:
        batch, width = next_ids.shape
        features = self.read(features).to(self.dtype)
        last = send(counts or [width] * batch, features.device) - 1
        taken = features[torch.arange(batch, device=features.device), last]
        state.features = taken if state.features is None else torch.where((last >= 0)[:, None], taken, state.features)
        return self.heads[0](features)

    def expand(self, state: MedusaState, features: Tensor, ids: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        if state.features is None:
            raise ValueError("expand before extend: no feature of the target has been read")
        return self.heads[depth](state.features)[:, None].expand(-1, ids.shape[1], -1)

    def reset_tree(self, state: MedusaState) -> None:
        pass

    def align(self, features: Tensor, next_ids: Tensor, steps: int = 3) -> list[Tensor]:
        """Training form: outputs of heads 1 to `steps`, [B, T, H] each, in the rows of `Draft.align`.

        Row t of step j is head j at feature t - (j - 1), the last one that the target has given when token t + 2 is
        drafted j levels deep; so all steps predict the same feature. The first j - 1 rows read feature 0.

        Raises:
            ValueError: more steps than there are heads.
        """
        if steps > len(self.heads):
            raise ValueError(
                f"{steps} align steps, but the draft has {len(self.heads)} heads; an align step trains one"
            )
        first = self.read(features).to(self.dtype)
        return [
            head(torch.cat([first[:, :1].expand(-1, min(j, first.shape[1]), -1), first[:, : first.shape[1] - j]], 1))
            for j, head in enumerate(self.heads[:steps])
        ]

    def align_step(self, length: int, device: torch.device) -> AlignStep:
        raise NotImplementedError("heads do not read each other's outputs: `align` runs them side by side")

    def fuse(self, stream: Tensor, embeddings: Tensor) -> Tensor:
        return stream
