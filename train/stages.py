"""The stages of a run: which settings hold at an optimizer step, and the learning rate's schedule across them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from draftwood.configs.schema import RunConfig
from draftwood.train.losses import Distillation
from draftwood.train.optim import Optimizers
from draftwood.train.setup import loss_weights


@dataclass(frozen=True)
class Stage:
    """Optimizer steps `start` to `end` - 1 of a run and their settings.

    Consecutive stages of the same `optimizer` settings share one schedule, from `schedule_start` to `schedule_end`.
    """

    config: RunConfig
    start: int
    end: int
    schedule_start: int
    schedule_end: int


def plan_stages(config: RunConfig, steps_per_epoch: int) -> tuple[Stage, ...]:
    """The stages that are reached within `loop.max_steps`; schedules end where training does."""
    stages: list[Stage] = []
    for part in config.stage_configs():
        start = stages[-1].end if stages else 0
        end = start + part.loop.epochs * steps_per_epoch
        end = min(end, config.loop.max_steps or end)
        if end == start:
            break
        if stages and stages[-1].config.optimizer == part.optimizer:
            first = stages[-1].schedule_start
            stages = [replace(s, schedule_end=end) if s.schedule_start == first else s for s in stages]
        else:
            first = start
        stages.append(Stage(part, start, end, first, end))
    return tuple(stages)


def measured_config(stages: Sequence[Stage]) -> RunConfig:
    """The settings that validation measures by, from the first stage on: the last ones with the most align steps."""
    return max(reversed(stages), key=lambda stage: stage.config.align.steps).config


class Course:
    """Puts the settings of each stage into the module as its steps come, and holds the optimizers of its schedule."""

    def __init__(self, module: Distillation, stages: Sequence[Stage]):
        self.stages = tuple(stages)
        self._module = module
        self._enter(self.stages[0])
        self.optimizers = self._optimizers(self.stages[0])

    @property
    def total_steps(self) -> int:
        return self.stages[-1].end

    def at(self, step: int) -> Stage:
        """The stage of optimizer step `step`, from 0. A new schedule begins with fresh moments."""
        stage = next(s for s in self.stages if step < s.end)
        if stage != self.stage:
            if stage.schedule_start != self.stage.schedule_start:
                self.optimizers = self._optimizers(stage)
            self._enter(stage)
        return stage

    @contextmanager
    def weighing(self, config: RunConfig) -> Iterator[None]:
        """The loss weights of `config` for a while, whatever the stage."""
        before, self._module.weights = self._module.weights, loss_weights(config)
        try:
            yield
        finally:
            self._module.weights = before

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._module.weights = loss_weights(stage.config)
        self._module.draft.detaches = stage.config.align.detach

    def _optimizers(self, stage: Stage) -> Optimizers:
        length = stage.schedule_end - stage.schedule_start
        return Optimizers(self._module.draft, stage.config.optimizer, length, stage.schedule_start)
