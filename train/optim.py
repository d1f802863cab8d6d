"""Optimizers of a draft: AdamW for all of it, or Muon for its matrices and AdamW for the rest."""

import math
from typing import Any

import torch
from torch import nn

from draftwood.configs.schema import OptimizerConfig


class Optimizers:
    """One or two torch optimizers stepped together; the learning rates follow from the number of the step alone."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int, first_step: int = 0):
        """
        Args:
            total_steps: of the schedule, which begins at optimizer step `first_step` of the run.

        Raises:
            ValueError: `muon` for a model without matrices.
        """
        self.config = config
        self.first_step = first_step
        self.total_steps = total_steps
        parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in parameters if p.ndim == 2] if config.name == "muon" else []
        rest = [p for p in parameters if all(p is not m for m in matrices)]
        self.members: list[tuple[torch.optim.Optimizer, float]] = []
        if config.name == "muon":
            if not matrices:
                raise ValueError("optimizer.name is muon, but the draft has no matrix to train; use adamw")
            muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95)
            self.members.append((muon, config.muon_lr))
        if rest:
            adamw = torch.optim.AdamW(rest, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
            self.members.append((adamw, config.lr))

    def factor(self, step: int) -> float:
        """What learning rates are multiplied by at optimizer step `step` of the run, from 0."""
        return schedule(step - self.first_step, self.total_steps, self.config)

    def step(self, step: int) -> None:
        """Takes optimizer step number `step` of the run, from 0, and clears the gradients."""
        factor = self.factor(step)
        for optimizer, lr in self.members:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer, _ in self.members]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for (optimizer, _), state in zip(self.members, states, strict=True):
            optimizer.load_state_dict(state)


def schedule(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The learning rate's factor at optimizer step `step` of 0 to total_steps - 1: linear warm-up to 1, then to 0."""
    warmup = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    remaining = (total_steps - step) / max(1, total_steps - warmup)
    return remaining if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * remaining))
