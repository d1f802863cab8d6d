"""Distillation, from top to bottom.

    accelerate launch -m draftwood.train --config smollm2-135m optimizer.lr=1e-3      one or many processes
    distill(load_config("smollm2-135m"))                                             the same from Python

A run lives in <output>/<name>: config.json, metrics.jsonl, checkpoints/, best/ and, unless kept elsewhere, features/.
Started again it goes on from its latest checkpoint, to the same weights as if it had not stopped.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from draftwood.configs.schema import RunConfig
from draftwood.models.target import Target
from draftwood.train import setup, sharding
from draftwood.train.batches import Batch, add_noise, collate, global_batches, micro_batches
from draftwood.train.checkpoints import DamagedCheckpoint, load_checkpoint, provenance, random_state, set_random_state
from draftwood.train.decoding import decode_held_out
from draftwood.train.metrics import Meter, Metrics, summarise
from draftwood.train.run import Run, set_up
from draftwood.train.summary import announce
from draftwood.train.tracking import StopRequest

logger = logging.getLogger(__name__)


class ResumeError(ValueError):
    """A run's folder holds a checkpoint that this configuration can't go on from."""


class Stopped(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM) and ended; `checkpoint` is the folder that it saved.

    Stopped before its first step it has saved none: rows and features that are done stay, and are not made again.
    """

    def __init__(self, checkpoint: Path | None):
        what = "before training; what is prepared stays" if checkpoint is None else f"and saved {checkpoint}"
        super().__init__(f"stopped {what}. Run the same command to go on from there")
        self.checkpoint = checkpoint


@dataclass
class Position:
    """Where a run is: optimizer steps taken, the epoch, batches of it that are done, and the best validation so far."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = 0.0


def distill(config: RunConfig, target: Target | None = None, console: Console | None = None) -> Path:
    """Trains a draft as `config` says and returns the folder of the best one.

    Args:
        target: already loaded; None loads `config.target`.

    Raises:
        Stopped: asked to stop; a checkpoint was saved, unless training had not begun.
        ResumeError, OldCheckpoint, FeatureError, ValueError: what does not fit and what to do about it.
    """
    with StopRequest() as stop:
        try:
            run = set_up(config, target, console or Console(stderr=True))
        except KeyboardInterrupt:
            raise Stopped(None) from None
        return train(run, stop)


def train(run: Run, stop: StopRequest) -> Path:
    """Trains a run that is set up, from its latest checkpoint to its end; returns and raises as `distill`."""
    try:
        meter = run.meter()
        position = _resume(run, meter)
        announce(run, position.step)
        stop.wait_for_steps(run.accelerator)
    except KeyboardInterrupt:
        raise Stopped(None) from None
    run.log.start_at(position.step, run.total_steps)
    while position.step < run.total_steps:
        batches = global_batches(run.train.sizes.lengths, run.global_batch_size, run.config.seed, position.epoch)
        started = time.perf_counter()
        norm = _train_step(run, batches[position.batch], position, meter)
        run.log.count_step(time.perf_counter() - started, run.train.sizes.supervised[batches[position.batch]].sum())
        position.step += 1
        position.batch += 1
        is_epoch_end = position.batch == len(batches)
        if is_epoch_end:
            position.epoch, position.batch = position.epoch + 1, 0
        _after_step(run, position, meter, norm, is_epoch_end, stop)
    run.log.close()
    run.accelerator.wait_for_everyone()
    return run.checkpoints.best


def _resume(run: Run, meter: Meter) -> Position:
    """Puts the latest checkpoint that is whole back, if there is one, and returns where training goes on."""
    latest = run.checkpoints.latest()
    position = Position()
    if latest is not None:
        if not run.config.loop.resume:
            raise ResumeError(f"{run.folder} holds {latest.name}; set loop.resume=true, another name, or delete it")
        latest, weights, state = _load_latest(run)
        changed = sorted(key for key in run.identity if state["identity"].get(key) != run.identity[key])
        if changed:
            details = "; ".join(f"{key}: {state['identity'].get(key)} -> {run.identity[key]}" for key in changed)
            raise ResumeError(
                f"{latest} is of another run ({details}). Undo the change, or use another name or draft.init_from"
            )
        sharding.load_weights(run.module.draft, weights)
        position = Position(**state["position"])
        run.course.at(max(0, position.step - 1))  # whose optimizers were saved
        sharding.load_moments(run.course.optimizers, state["optimizers"])
        set_random_state(state["random"])
        if run.accelerator.is_main_process:
            meter.sums.copy_(state["meter"])
        run.console.print(f"resuming after step {position.step}, from {latest}", highlight=False)
    return position


def _load_latest(run: Run) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The latest checkpoint that is whole: where, its weights, its training state. Damaged ones are set aside."""
    steps = run.checkpoints.steps()
    damaged: list[Path] = []
    for path in reversed(steps):
        try:
            weights, state = load_checkpoint(path)
        except DamagedCheckpoint as error:
            damaged.append(path)
            run.accelerator.print(f"{error}; going on from the one before it", file=run.console.file)
            continue
        run.accelerator.wait_for_everyone()  # before one of them moves what others may still read
        if run.accelerator.is_main_process:
            run.checkpoints.set_aside(damaged)
        return path, weights, state
    raise ResumeError(
        f"{run.checkpoints.folder}: {', '.join(p.name for p in steps)} damaged, and there is no older checkpoint; "
        f"delete {run.folder} to start anew, or take draft.init_from={run.checkpoints.best} under another name"
    )


def _train_step(run: Run, numbers: list[int], position: Position, meter: Meter) -> Tensor:
    """One optimizer step over the rows `numbers`, shared among the processes; returns the gradient's norm."""
    accelerator, config = run.accelerator, run.config
    # Known to all from the rows themselves, so the loss is that of the global batch however it is split.
    num_rows = max(1, int(run.train.sizes.supervised[numbers].sum()))
    stage = run.course.at(position.step).config
    shares = micro_batches(numbers, config.loop.batch_size, accelerator.num_processes, accelerator.process_index)
    for i, share in enumerate(shares):
        batch = _load(run, run.train, share)
        inputs = add_noise(batch, stage.align.feature_noise, config.seed, position.epoch)
        is_last = i == len(shares) - 1
        with sharding.accumulating(accelerator, run.model, is_last):
            out = run.model(batch, num_rows, inputs, stage.align.steps)
            # Processes are averaged by the reduction; the loss is a sum over all of them.
            accelerator.backward(out.loss * accelerator.num_processes)
        meter.add(out, batch)
    norm = sharding.whole(nn.utils.clip_grad_norm_(run.module.parameters(), stage.optimizer.max_grad_norm))
    run.course.optimizers.step(position.step)
    return norm


def _after_step(
    run: Run, position: Position, meter: Meter, norm: Tensor, is_epoch_end: bool, stop: StopRequest
) -> None:
    """What is due after optimizer step `position.step`: a log line, a validation, a checkpoint, the end."""
    loop, step = run.config.loop, position.step
    is_last = step == run.total_steps
    if step % loop.log_every == 0 or is_last:
        metrics = _reduce(run, meter, run.course.stage.config)
        meter.reset()
        run.log.training(step, position.epoch, run.course.optimizers.factor(step - 1), float(norm), metrics)
    if is_last or (is_epoch_end if loop.evaluate_every is None else step % loop.evaluate_every == 0):
        _validate_and_keep_best(run, position)
    if run.config.loop.decode_every is not None and (is_last or step % run.config.loop.decode_every == 0):
        decode_held_out(run, step, position.epoch)
    is_stopped = stop.is_requested()
    if step % loop.save_every == 0 or is_last or is_stopped:
        path = _save(run, position, meter)
        if is_stopped and not is_last:
            run.log.close()
            raise Stopped(path)


def _validate_and_keep_best(run: Run, position: Position) -> None:
    metrics = validate(run)
    run.log.validation(position.step, position.epoch, metrics)
    if metrics.acceptance_length > position.best:
        position.best = metrics.acceptance_length
        weights = sharding.whole_weights(run.module.draft)
        if run.accelerator.is_main_process:
            facts = provenance(run.config, step=position.step, validation=metrics.to_dict(), **run.data_facts)
            run.checkpoints.save_best(run.module.draft, weights, facts)


@torch.no_grad()
def validate(run: Run) -> Metrics:
    """Metrics of the draft over all validation rows, each counted once; processes may have different shares."""
    meter = run.meter()
    run.module.eval()
    with run.course.weighing(run.measured), sharding.gathered(run.model):
        for batch in _validation_batches(run):
            meter.add(run.module(batch, 1), batch)
    run.module.train()
    return _reduce(run, meter, run.measured)


def _validation_batches(run: Run) -> Iterator[Batch]:
    size, accelerator = run.config.loop.batch_size, run.accelerator
    order = np.argsort(-run.validation.sizes.lengths, kind="stable").tolist()
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    for numbers in batches[accelerator.process_index :: accelerator.num_processes]:
        yield _load(run, run.validation, numbers)


def _load(run: Run, split: setup.Split, numbers: list[int]) -> Batch:
    return collate(
        numbers, split.rows, split.features(numbers), split.features.target.feature_dim, run.accelerator.device
    )


def _reduce(run: Run, meter: Meter, config: RunConfig) -> Metrics:
    return summarise(run.accelerator.reduce(meter.sums.clone(), "sum"), setup.loss_weights(config))


def _save(run: Run, position: Position, meter: Meter) -> Path:
    sums = run.accelerator.reduce(meter.sums.clone(), "sum")
    weights = sharding.whole_weights(run.module.draft)
    moments = sharding.whole_moments(run.course.optimizers)
    if run.accelerator.is_main_process:
        state = {
            "identity": run.identity,
            "position": vars(position),
            "optimizers": moments,
            "random": random_state(),
            "meter": sums,
        }
        facts = provenance(run.config, step=position.step, **run.data_facts)
        run.checkpoints.save(position.step, run.module.draft, weights, facts, state)
    run.accelerator.wait_for_everyone()
    latest = run.checkpoints.latest()
    if latest is None:
        raise FileNotFoundError(f"{run.checkpoints.folder}: the checkpoint of the main process is not visible here")
    return latest
