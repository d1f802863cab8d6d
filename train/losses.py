"""One training step's loss: all align steps of a batch over its supervised rows (HASS, arXiv 2408.15766)."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftwood.kernels.distill_loss import DistillHead, DistillWeights, TeacherStatistics, distill_loss
from draftwood.kernels.own_head_loss import own_head_loss
from draftwood.models.draft_base import Draft
from draftwood.train.batches import Batch
from draftwood.train.compiled import compile_layers


class StepOutput(NamedTuple):
    """`loss` [] to go backward from; `parts` [J, 4] and `ranks` [J, R] as in `distill_loss`.

    `places` [R] int64: where the supervised rows lie in the flattened [B, T - 2] rows of the draft.
    """

    loss: Tensor
    parts: Tensor
    ranks: Tensor
    places: Tensor


class Distillation(nn.Module):
    """The draft and its loss as one module, so that data parallelism sees one forward and reduces once per backward.

    Row t of the draft reads (feature t, token t + 1) and predicts feature t + 1, whose logits are those of token t + 2:
    of T tokens, rows 0 to T - 3 can be trained.
    """

    def __init__(
        self,
        draft: Draft,
        head: DistillHead,
        weights: DistillWeights,
        steps: int,
        rows_per_chunk: int | None = None,
        precision: torch.dtype | None = None,
        compiled: bool = False,
    ):
        """
        Args:
            precision: the dtype the draft's forward is autocast to, None for its own; the loss follows the head's.
            compiled: the passes over the logits and the draft's layers through `torch.compile`.
        """
        super().__init__()
        self.draft = draft
        self.head = head
        self.weights = weights
        self.steps = steps
        self.rows_per_chunk = rows_per_chunk
        self.precision = precision
        self.compiled = compiled
        if compiled:
            compile_layers(draft)

    def forward(
        self, batch: Batch, num_rows: float, inputs: Tensor | None = None, steps: int | None = None
    ) -> StepOutput:
        """Loss of `batch`, its sum over supervised rows divided by `num_rows`, those of the global batch.

        Args:
            inputs: [B, T, H] features to read instead of the batch's own, such as noisy ones; what is predicted stays.
            steps: only so many align steps, the first ones.
        """
        read = batch.features if inputs is None else inputs
        with torch.autocast(read.device.type, self.precision, enabled=self.precision is not None):
            outputs = self.draft.align(read[:, :-2], batch.tokens[:, 1:-1], steps=steps or self.steps)
        places = batch.supervised[:, :-2].flatten().nonzero()[:, 0]

        def predicted(x: Tensor) -> Tensor:
            return x[:, 1:-1].flatten(0, 1)[places]

        rows = [self.draft.head_input(y.flatten(0, 1)[places]) for y in outputs]
        statistics = TeacherStatistics(predicted(batch.statistics.normaliser), predicted(batch.statistics.argmax))
        features = predicted(batch.features[..., -self.head.weight.shape[1] :])
        own_head = self.draft.own_head
        loss = partial(distill_loss, compiled=self.compiled)
        if own_head is not None:
            loss = partial(own_head_loss, weight=own_head)
        found = loss(
            rows,
            features=features,
            head=self.head,
            weights=self.weights,
            num_rows=num_rows,
            statistics=statistics,
            rows_per_chunk=self.rows_per_chunk,
        )
        return StepOutput(*found, places)
