"""An independent small language model as the draft: any supported causal LM with the target's tokenizer.

Speculative decoding as first published (arXiv 2211.17192), and STree's setting with a Mamba-2 draft (arXiv 2505.14969).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwood.kernels.tables import newest_ancestors
from draftwood.models.draft import max_length
from draftwood.models.target import Target, load_target
from draftwood.models.transfer import send
from draftwood.models.tree import Tree, root_tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftwood.models.state import DecodeState


@dataclass
class LanguageState:
    """What the model has read, and the tree it has drafted since.

    Attributes:
        first: [B], the first token of each prompt, until the prompts are read.
        decode: the committed state; it holds all tokens before the root.
        roots: [B], the last emitted tokens.
        nodes, parents: [B, n] of the nodes drafted so far, the root among them.
    """

    first: Tensor | None = None
    decode: "DecodeState | None" = None
    roots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    nodes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    parents: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class LanguageDraft:
    """Drafts with `model`, to which the target's features say nothing; decodes by the calls of `Draft`.

    The model is a target of its own: a level of a tree is one `verify` of the nodes so far, what the target keeps is
    committed by the same replay, and so any family drafts chains and trees for any other.

    Attributes:
        draft_vocab: [Vd] int64, the tokens the model has logits for; None where they are the target's.
    """

    def __init__(self, model: Target, target: Target):
        _check_tokenizers(model, target)
        self.model = model
        self.vocab_size = min(model.vocab_size, target.vocab_size)  # both may be padded, each in its own way
        self.draft_vocab = (
            None if self.vocab_size == target.vocab_size else torch.arange(self.vocab_size, device=target.device)
        )

    @classmethod
    def load(
        cls,
        model_or_path: "PreTrainedModel | str | Path",
        target: Target,
        dtype: torch.dtype | str | None = None,
    ) -> "LanguageDraft":
        """From a transformers model, a folder, a hub id or a built-in asset, on the target's device.

        Args:
            dtype: None keeps what the checkpoint is saved in.

        Raises:
            ValueError: as `load_target`, or a tokenizer that is not the target's.
        """
        return cls(load_target(model_or_path, dtype, target.device), target)

    @property
    def max_length(self) -> int | None:
        """Positions the model was made for; None where it states no limit."""
        return max_length(self.model)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's weights, by which reports tell drafts apart."""
        return self.model.model.state_dict()

    def new_state(self, batch_size: int) -> LanguageState:
        return LanguageState()

    def begin(self, state: LanguageState, first: Tensor) -> None:
        """Gives the prompts' first tokens [B], which `extend` does not: its rows start with the second."""
        state.first = first

    @torch.no_grad()
    def extend(
        self, state: LanguageState, features: Tensor, next_ids: Tensor, counts: list[int] | None = None
    ) -> Tensor:
        """Commits all tokens but the last of each row, the new root; outputs [B, t, H] hold at that row only.

        Args:
            features: unused.
            next_ids: [B, t] int64; counts: how many of them are real in each row, the first ones (default all).
        """
        batch, width = next_ids.shape
        counts = counts or [width] * batch
        next_ids = self._known(next_ids)
        if state.decode is None:
            return self._read_prompts(state, next_ids, counts)
        chain = torch.cat([state.roots[:, None], next_ids], 1)
        out = self.model.verify(state.decode, chain, Tree.chain(width))
        self.model.commit(state.decode, [range(count) for count in counts])
        last = send(counts, chain.device)
        state.roots = chain[torch.arange(batch, device=chain.device), last]
        return out.features[:, 1:]

    def _read_prompts(self, state: LanguageState, next_ids: Tensor, counts: list[int]) -> Tensor:
        if state.first is None:
            raise ValueError("a language draft needs the first token of each prompt: call begin(state, first) first")
        ids = torch.cat([self._known(state.first)[:, None], next_ids], 1)
        lengths = torch.tensor(counts, device=ids.device)
        mask = torch.arange(next_ids.shape[1], device=ids.device) < lengths[:, None]
        state.decode = self.model.prefill(ids[:, :-1], mask)
        state.roots = ids[torch.arange(len(counts), device=ids.device), lengths]
        out = self.model.verify(state.decode, state.roots[:, None], root_tree())
        return out.features.expand(-1, next_ids.shape[1], -1)

    def reset_tree(self, state: LanguageState) -> None:
        """Forgets the nodes of the last tree."""
        state.nodes = state.roots[:, None]
        state.parents = torch.full_like(state.nodes, -1)

    @torch.no_grad()
    def expand(self, state: LanguageState, features: Tensor, ids: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        """Adds nodes of one depth and returns the model's features [B, m, H]; arguments as `Draft.expand`."""
        batch, m = ids.shape
        earlier = ancestors[..., :-m].expand(batch, -1, -1)
        state.nodes = torch.cat([state.nodes, self._known(ids)], 1)
        # node 0, the root, stands before all that were added
        state.parents = torch.cat([state.parents, newest_ancestors(earlier)], 1)
        assert state.decode is not None
        return self.model.verify(state.decode, state.nodes, Tree(state.parents, max_depth=depth)).features[:, -m:]

    def logits(self, predicted: Tensor) -> Tensor:
        """Logits [..., Vd] of the model's features [..., H]."""
        return self.model.head(predicted)[..., : self.vocab_size]

    def _known(self, ids: Tensor) -> Tensor:
        return ids.clamp(max=self.model.vocab_size - 1)  # a padding token of the target's, which no text has


def _check_tokenizers(model: Target, target: Target) -> None:
    ours, theirs = model.tokenizer, target.tokenizer
    if ours is None or theirs is None:
        if model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft {model.name} has {model.vocab_size} tokens, the target {target.name} {target.vocab_size}: "
                "a language model drafts only for a target with its own tokenizer"
            )
        return
    if ours.get_vocab() == theirs.get_vocab():
        return
    mine, its = (_by_id(tokenizer) for tokenizer in (ours, theirs))
    at = next(i for i in sorted({*mine, *its}) if mine.get(i) != its.get(i))
    raise ValueError(
        f"the tokenizers of the draft {model.name} and the target {target.name} differ: token {at} is "
        f"{mine.get(at)!r} in one and {its.get(at)!r} in the other; take a draft with the target's tokenizer"
    )


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}
