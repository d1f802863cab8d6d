"""Drafts whose layers attend: decoding from a key/value cache, and harmonized attention in training."""

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.models.draft_base import AlignStep, Draft
from draftwood.models.draft_state import DraftState
from draftwood.models.harmony import harmonized_attention

Rotary = tuple[Tensor, Tensor]
KeysValues = list[tuple[Tensor, Tensor]]  # of each layer


class AttentionLayer(Protocol):
    """A decoder layer without its scores: project, attend as the caller must, finish."""

    def rotary(self, positions: Tensor) -> Rotary: ...
    def queries_keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]: ...
    def finish(self, x: Tensor, attended: Tensor) -> Tensor: ...


class AttentionDraft(Draft[DraftState]):
    """What decoding and training of such a draft have in common, whatever its rows and layers are made of."""

    @property
    @abstractmethod
    def decoder_layers(self) -> list[AttentionLayer]: ...

    @abstractmethod
    def output(self, x: Tensor) -> Tensor:
        """Predicted features from the last layer's output."""

    def new_state(self, batch_size: int) -> DraftState:
        return DraftState(batch_size, len(self.decoder_layers))

    def extend(self, state: DraftState, features: Tensor, next_ids: Tensor, counts: list[int] | None = None) -> Tensor:
        self.reset_tree(state)
        rows, device = features.shape[1], features.device
        mask = None
        if state.width:
            causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
            mask = state.mask_for(causal[None], device)
        lengths, _ = state.committed(device)
        positions = lengths + torch.arange(rows, device=device)
        out = self._run(state, self.read(features), next_ids, positions, mask)
        state.commit(rows, counts if counts is not None else [rows] * len(state.lengths))
        return out

    def expand(self, state: DraftState, features: Tensor, ids: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        mask = state.mask_for(ancestors, features.device)
        # The root's own row is the last committed one, so depth 1 comes right behind.
        lengths, _ = state.committed(features.device)
        positions = lengths + (depth - 1)
        out = self._run(state, features, ids, positions.expand(-1, ids.shape[1]), mask)
        state.num_nodes += ids.shape[1]
        return out

    def reset_tree(self, state: DraftState) -> None:
        state.num_nodes = 0

    def _run(self, state: DraftState, stream: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.fuse(stream, self.target.embed(ids))
        for index, layer in enumerate(self.decoder_layers):
            q, k, v = layer.queries_keys_values(x, layer.rotary(positions))
            x = layer.finish(x, state.attend(index, q, k, v, mask))
        return self.output(x)

    def align_step(self, length: int, device: torch.device) -> AlignStep:
        rotary = [layer.rotary(torch.arange(length, device=device)[None]) for layer in self.decoder_layers]
        made: list[KeysValues] = []

        def step(first: Tensor, before: Tensor | None, embeddings: Tensor) -> Tensor:
            read = (first, before, embeddings)
            if made and torch.is_grad_enabled():
                # A later step is computed again in the backward pass, so that memory hardly grows with the align steps.
                out, own = checkpoint(
                    self._align, *read, rotary, tuple(made), use_reentrant=False, preserve_rng_state=False
                )
            else:
                out, own = self._align(*read, rotary, tuple(made))
            made.append(own)
            return out

        return step

    def _align(
        self,
        first: Tensor,
        before: Tensor | None,
        embeddings: Tensor,
        rotary: list[Rotary],
        made: tuple[KeysValues, ...],
    ) -> tuple[Tensor, KeysValues]:
        """Outputs of an align step, and its keys and values in every layer; `made`: those of the steps before it."""
        x, own = self.fuse(self.stream(first, before), embeddings), []
        for index, layer in enumerate(self.decoder_layers):
            query, key, value = layer.queries_keys_values(x, rotary[index])
            own.append((key, value))
            keys, values = zip(*(step[index] for step in made), (key, value), strict=True)
            x = layer.finish(x, harmonized_attention(query, keys, values))
        return self.output(x), own
