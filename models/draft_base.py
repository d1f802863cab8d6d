"""What the drafts over a target's features have in common: vocabulary and head, fusion, the loop over align steps.

Row t reads the feature of token t and the embedding of token t + 1 and predicts the feature of token t + 1, whose
logits are those of token t + 2 (EAGLE, arXiv 2401.15077). Training is harmonized (HASS, arXiv 2408.15766): align step j
repeats what decoding does after j - 1 steps on the draft's own features.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.models.layers import LayerShape

if TYPE_CHECKING:
    from draftwood.models.target import Target

State = TypeVar("State")


@dataclass(frozen=True)
class DraftConfig:
    """What a checkpoint needs to rebuild a draft, besides its weights; sizes, layers and what a kind adds.

    Attributes:
        max_length: positions beyond which the draft was not made to work; None: there is no such limit.
    """

    shape: Any
    num_layers: int = 1
    max_length: int | None = None

    shape_type: ClassVar[type] = LayerShape

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Raises:
        ValueError: a field this version does not know, so could not honour, or one that is missing.
        """
        try:
            return cls(**{**values, "shape": cls.shape_type(**values["shape"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"the draft's config {values} is not one this version can honour: {error}") from None


def sorted_vocab(draft_vocab: Tensor | None) -> Tensor | None:
    """A draft vocabulary as drafts keep it: [Vd] int64, ascending."""
    return None if draft_vocab is None else draft_vocab.to(torch.int64).sort().values


def draw_linear_weights(module: nn.Module) -> None:
    """Fresh weights for every linear layer in `module`, so that outputs are as large as inputs; biases are 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def take_scale(norm: nn.RMSNorm, target: "Target") -> None:
    """Gives `norm` the weight of the target's final norm: predicted features begin with the scale of its own."""
    weight = getattr(target.final_norm, "weight", None)
    if weight is not None:
        norm.weight.data.copy_(weight.float())


# (stream 0, outputs of the step before, embeddings) -> outputs
AlignStep = Callable[[Tensor, Tensor | None, Tensor], Tensor]


class Draft(nn.Module, Generic[State]):
    """A draft over a target's features; embeddings are the target's, and so is the head unless it says otherwise.

    A subclass says how rows enter the layers, how it decodes from a state of its own, and how an align step runs.

    Attributes:
        draft_vocab: [Vd] int64, the target's token of each draft logit; None where it has the target's vocabulary.
        detaches: whether an align step's own features carry no gradient into the step that made them.
    """

    kind: ClassVar[str]
    config_type: ClassVar[type[DraftConfig]] = DraftConfig
    option_names: ClassVar[tuple[str, ...]] = ()  # what `from_target` takes, besides the draft vocabulary
    draft_vocab: Tensor | None

    def __init__(self, config: Any, target: "Target", draft_vocab: Tensor | None = None):
        super().__init__()
        if config.shape.hidden_dim != target.hidden_dim:
            raise ValueError(f"the draft's hidden width is {config.shape.hidden_dim}, the target's {target.hidden_dim}")
        self.config = config
        self.detaches = True
        self._target = (target,)  # in a tuple, so that the target's modules are not the draft's
        self.register_buffer("draft_vocab", draft_vocab, persistent=draft_vocab is not None)
        self._head_rows: tuple[tuple[int, int], Tensor] | None = None

    @property
    def target(self) -> "Target":
        return self._target[0]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def options(self) -> dict[str, Any]:
        """What `from_target` would make this draft with, by `option_names`."""
        return {name: getattr(self.config, name) for name in self.option_names if hasattr(self.config, name)}

    @classmethod
    def prepare_target(cls, target: "Target", **options: Any) -> None:
        """Makes the target give the features that such a draft reads; most read what it gives anyway."""

    # `from_target(target, *, draft_vocab=None, **options)`: an untrained draft, in float32, on the target's device.
    from_target: ClassVar[Callable[..., "Draft"]]

    @property
    def max_length(self) -> int | None:
        """Positions beyond which the draft was not made to work; None where there is no such limit."""
        return self.config.max_length

    def forward(self, features: Tensor, next_ids: Tensor, cache: State | None = None) -> tuple[Tensor, State]:
        """Decode-time call: predicted features [B, t, H] of rows (features [B, t, F], next_ids [B, t]).

        `cache` holds the rows before; it is extended in place and returned.
        """
        state = self.new_state(features.shape[0]) if cache is None else cache
        return self.extend(state, features, next_ids), state

    @abstractmethod
    def new_state(self, batch_size: int) -> State:
        """What decoding starts from: no rows read."""

    @abstractmethod
    def extend(self, state: State, features: Tensor, next_ids: Tensor, counts: list[int] | None = None) -> Tensor:
        """Commits rows of target features and returns predicted features [B, t, H].

        Args:
            state: extended in place.
            features: [B, t, F] the target's, or [B, t, H] the draft's own.
            next_ids: [B, t] int64, the token after each feature's.
            counts: rows of each batch row that are real, the first ones (default all).
        """

    @abstractmethod
    def expand(self, state: State, features: Tensor, ids: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        """Adds tree nodes of one depth, not committed, and returns predicted features [B, m, H].

        Args:
            features: [B, m, H], the draft's own outputs at the parents.
            ids: [B, m] int64, the nodes' tokens; depth: 1 for the root's children.
            ancestors: [B or 1, m, total] bool over all nodes added since `reset_tree`, these last, itself included.
        """

    @abstractmethod
    def reset_tree(self, state: State) -> None:
        """Forgets the nodes of the last tree."""

    def align(self, features: Tensor, next_ids: Tensor, steps: int = 3) -> list[Tensor]:
        """Training form: predicted features of align steps 1 to `steps`, each [B, T, H].

        Row t of step j is what `forward` gives after reading target features up to t - (j - 1) and then its own
        features for j - 1 steps. Padding on the right changes no row before it.
        """
        first, embeddings = self.read(features), self.target.embed(next_ids)
        step = self.align_step(features.shape[1], features.device)
        outputs: list[Tensor] = []
        for _ in range(steps):
            outputs.append(step(first, outputs[-1] if outputs else None, embeddings))
        return outputs

    @abstractmethod
    def align_step(self, length: int, device: torch.device) -> AlignStep:
        """A function that is called once per align step, in order, with stream 0, the outputs of the step before (None
        at the first) and the embeddings, and gives its outputs; all [B, T, H]."""

    def stream(self, first: Tensor, outputs: Tensor | None) -> Tensor:
        """What a step reads, [B, T, H]: stream 0, or the `outputs` of the step before, one row later."""
        if outputs is None:
            return first
        # the feature of token t is what row t - 1 predicted
        own = outputs[:, :-1].to(first.dtype)
        return torch.cat([first[:, :1], own.detach() if self.detaches else own], 1)

    def read(self, features: Tensor) -> Tensor:
        """Stream 0 [.., H] of what the target gives, [.., F]: the feature itself, which stands last."""
        return features[..., -self.config.shape.hidden_dim :]

    @abstractmethod
    def fuse(self, stream: Tensor, embeddings: Tensor) -> Tensor:
        """Rows as they enter the layers, from features and embeddings [B, t, H]."""

    @property
    def own_head(self) -> Tensor | None:
        """[Vd, H], the head's rows where they are the draft's own and trained with it."""
        return None

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

    def take_vocab(self, draft_vocab: Tensor) -> None:
        """Another draft vocabulary, [Vd] int64: with the target's head a draft has no weights that depend on it.

        Raises:
            ValueError: the head is the draft's own.
        """
        if self.own_head is not None:
            raise ValueError(f"the head of a draft of kind {self.kind} is its own, trained for its vocabulary alone")
        self.register_buffer("draft_vocab", draft_vocab.to(self.target.device, torch.int64).sort().values)
        self._head_rows = None

    @property
    def logit_scale(self) -> float:
        """logits = logit_scale * head_input(predicted) @ head_weight.T"""
        return self.target.logit_scale

    def head_input(self, predicted: Tensor) -> Tensor:
        """What the head reads of predicted features, [.., H]."""
        return predicted

    def logits(self, predicted: Tensor) -> Tensor:
        """Logits [..., Vd] of predicted features [..., H], over the draft vocabulary."""
        weight = self.head_weight
        return F.linear(self.head_input(predicted).to(weight.dtype), weight) * self.logit_scale
