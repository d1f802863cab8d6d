"""The level of a growing tree that gets children, each row of a batch with its own."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftwood.decode.propose.base import Drafter


class Frontier:
    """Starts at the root; all on the draft's device.

    Attributes:
        outputs: [B, f, D], the draft's at the nodes, which predict their children.
        depth: of the nodes.
    """

    def __init__(self, draft: "Drafter", state: Any, head_row: Tensor):
        self.draft, self.state = draft, state
        self.outputs, self.depth = head_row[:, None], 0
        batch, device = head_row.shape[0], head_row.device
        self._ancestors = torch.zeros(
            batch, 1, 0, dtype=torch.bool, device=device
        )  # among all nodes run: [B, f, total]
        draft.reset_tree(state)

    def descend(self, source: Tensor, tokens: Tensor) -> None:
        """Runs the draft on children: `tokens` [B, m] below its nodes `source` [B, m]; they are the frontier then."""
        self.depth += 1
        above = self.outputs.gather(1, source[:, :, None].expand(-1, -1, self.outputs.shape[-1]))
        inherited = self._ancestors.gather(1, source[:, :, None].expand(-1, -1, self._ancestors.shape[-1]))
        itself = torch.eye(source.shape[1], dtype=torch.bool, device=source.device).expand(source.shape[0], -1, -1)
        self._ancestors = torch.cat([inherited, itself], dim=2)
        self.outputs = self.draft.expand(self.state, above, tokens, self.depth, self._ancestors)
