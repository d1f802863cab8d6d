"""What every drafting strategy offers to the decoding loop, and what those that run a draft have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftwood.decode.sampled import Draws
from draftwood.models.language_draft import LanguageDraft
from draftwood.models.transfer import send
from draftwood.models.tree import Tree, root_tree


class Drafter(Protocol):
    """What a draft offers while decoding, whatever it is; the calls are those of `draftwood.models.draft_base.Draft`.

    `max_length` and `max_depth`: positions and levels of a tree beyond which it does not draft; None: no such limit.
    """

    draft_vocab: Tensor | None

    @property
    def max_length(self) -> int | None: ...

    def new_state(self, batch_size: int) -> Any: ...

    def extend(self, state: Any, features: Tensor, next_ids: Tensor, counts: list[int] | None = None) -> Tensor: ...

    def expand(self, state: Any, features: Tensor, ids: Tensor, depth: int, ancestors: Tensor) -> Tensor: ...

    def reset_tree(self, state: Any) -> None: ...

    def logits(self, predicted: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Proposal:
    """A token tree.

    Attributes:
        tokens: [B, n] int64, the tokens at its nodes; node 0 is the root token.
        tree: shared, or one per row.
        draws: what the children were drawn from; None where they were chosen without chance.
    """

    tokens: Tensor
    tree: Tree
    draws: Draws | None = None


@runtime_checkable
class Proposer(Protocol):
    """A drafting strategy. Children are chosen without chance, or drawn and proposed with their `draws`: the
    acceptance rule relies on it.

    `max_length` is the number of tokens of context beyond which it must not be asked; None: there is no such bound.
    """

    max_length: int | None

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        """Reads the prompts: `input_ids` [B, T] and the target's `features` [B, T, D], row b with lengths[b] valid
        columns from the left, and `roots` [B], the token after each prompt."""
        ...

    def propose(self, max_depth: int) -> Proposal:
        """A tree of at most `max_depth` levels below the root."""
        ...

    def advance(self, tokens: Tensor, features: Tensor, paths: list[list[int]], roots: Tensor) -> None:
        """Reads what was kept: `tokens` [B, n] and the target's `features` [B, n, D] at the nodes of the last tree, for
        each row its path ([] where the row does not advance), and `roots` [B], the token after each path."""
        ...


def root_proposal(roots: Tensor) -> Proposal:
    """No drafts: the tree is the root alone."""
    return Proposal(roots[:, None], root_tree())


@runtime_checkable
class LogitsReader(Protocol):
    """A strategy that learns from what the target says of all its nodes, kept or not."""

    def read_logits(self, logits: Tensor) -> None:
        """The target's [B, n, V] at the nodes of the last tree; called before `advance`."""
        ...


class DraftProposer(ABC):
    """Keeps a draft's state in step with the target's.

    With T tokens committed, the draft has read rows 0..T-1, row t being (target feature of t, token t+1), and its
    output at row T-1, `self.head_row`, predicts the children of the root.
    """

    def __init__(self, draft: Drafter):
        self.draft = draft
        self.max_length: int | None = getattr(draft, "max_length", None)
        self.max_depth: int | None = getattr(draft, "max_depth", None)

    @abstractmethod
    def propose(self, max_depth: int) -> Proposal: ...

    def start(self, input_ids: Tensor, lengths: list[int], features: Tensor, roots: Tensor) -> None:
        batch, _ = input_ids.shape
        rows = torch.arange(batch, device=input_ids.device)
        last = torch.tensor(lengths, device=input_ids.device) - 1
        next_ids = input_ids.roll(-1, dims=1)
        next_ids[rows, last] = roots
        self.state = self.draft.new_state(batch)
        if isinstance(self.draft, LanguageDraft):  # the only kind that reads the first token
            self.draft.begin(self.state, input_ids[:, 0])
        outputs = self.draft.extend(self.state, features, next_ids, lengths)
        self.roots = roots
        self.head_row = outputs[rows, last]

    def advance(self, tokens: Tensor, features: Tensor, paths: list[list[int]], roots: Tensor) -> None:
        counts = [len(path) for path in paths]
        width = max(counts)
        if width == 0:
            return
        # Column i: node i of the path gives the feature, node i+1, or the new root, the token. Padding is the root's.
        sent = send([[*path, *[0] * (width - len(path)), len(path) - 1] for path in paths], tokens.device)
        index, last = sent[:, :-1], sent[:, -1]
        rows = torch.arange(len(paths), device=tokens.device)
        next_ids = tokens.gather(1, index).roll(-1, dims=1)
        next_ids[rows, last] = roots
        taken = features.gather(1, index[:, :, None].expand(-1, -1, features.shape[-1]))
        outputs = self.draft.extend(self.state, taken, next_ids, counts)
        moved = (last >= 0)[:, None]
        self.roots = torch.where(moved[:, 0], roots, self.roots)
        self.head_row = torch.where(moved, outputs[rows, last], self.head_row)

    def bounded(self, levels: int) -> int:
        """`levels`, or as many as the draft can fill."""
        return levels if self.max_depth is None else min(levels, self.max_depth)

    def children(self, outputs: Tensor, above: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids and cumulative log-probabilities [B, f, k] of the children of nodes with scores `above` [B, f]."""
        ids, top_logits, logits = self._top(outputs, k)
        # Never above 0, so that no child outranks its parent: also rounded, the sum under the logarithm is 1 or more.
        log_probs = top_logits.float() - logits.float().logsumexp(-1, keepdim=True)
        return ids, above[:, :, None] + log_probs

    def _top(self, outputs: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `k` likeliest next tokens after each of `outputs` [B, m, D].

        Returns:
            Their target ids and draft logits, [B, m, k], k less where the draft knows fewer tokens; all logits
            [B, m, Vd].
        """
        logits = self.draft.logits(outputs)
        values, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
        if self.draft.draft_vocab is not None:
            ids = self.draft.draft_vocab[ids]
        return ids, values, logits
