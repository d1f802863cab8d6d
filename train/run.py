"""A run before its first step: all that stays the same from there to the last."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from torch import nn

from draftwood.configs.schema import RunConfig
from draftwood.kernels.distill_loss import DistillHead
from draftwood.models.draft_base import Draft
from draftwood.models.fingerprint import fingerprint
from draftwood.models.target import Target
from draftwood.train import setup
from draftwood.train.batches import vocab_coverage
from draftwood.train.checkpoints import Checkpoints
from draftwood.train.losses import Distillation
from draftwood.train.metrics import Meter
from draftwood.train.sharding import parallel
from draftwood.train.stages import Course, measured_config, plan_stages
from draftwood.train.tracking import MetricsLog


@dataclass(frozen=True)
class Run:
    """The parts of a run, and its `identity`: what a checkpoint must agree with to go on from it.

    `data_facts` are for the provenance of its drafts: the digest of the training rows, and of a reduced draft
    vocabulary its size and the share of their reply tokens that are in it.
    """

    config: RunConfig
    folder: Path
    data_folder: Path  # of the prepared rows
    accelerator: Accelerator
    console: Console
    module: Distillation
    model: nn.Module  # `module`, for several processes inside DistributedDataParallel, or sharded
    course: Course
    train: setup.Split
    validation: setup.Split
    checkpoints: Checkpoints
    log: MetricsLog
    measured: RunConfig  # the settings that validation measures by
    global_batch_size: int
    identity: dict[str, Any] = field(default_factory=dict)
    data_facts: dict[str, Any] = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        return self.course.total_steps

    def meter(self) -> Meter:
        return Meter(self.measured.align.steps, self.accelerator.device)


def set_up(config: RunConfig, target: Target | None, console: Console) -> Run:
    """Prepares rows, joins the process group, loads the target, computes features: whatever is not there yet.

    Args:
        target: already loaded; None loads `config.target`.

    Raises:
        FeatureError, FileNotFoundError, ValueError, ImportError: what does not fit and what to do about it.
    """
    setup.check_machine(config)
    folder = Path(config.output) / config.name
    # Before the process group: the first process to take the lock prepares, the others wait without a timeout.
    data_folder = setup.prepare_rows(config, None if target is None else target.tokenizer)
    accelerator = setup.start_processes(config, folder)
    if target is None:
        target = setup.load_for_training(config, accelerator.device)
    elif target.device.type != accelerator.device.type:
        raise ValueError(
            f"the target given is on {target.device}, training runs on {accelerator.device}; move it there"
        )
    train, validation = setup.load_splits(config, target, data_folder, folder, accelerator, console)
    return assemble(config, target, data_folder, accelerator, console, train, validation)


def set_up_dry(config: RunConfig, target: Target | None, console: Console) -> Run:
    """As `set_up`, of a run that is only to be looked at: nothing stays written and no feature is computed.

    Rows that are not prepared yet are prepared in a temporary folder, which takes as long as it will.
    """
    setup.check_machine(config)
    folder = Path(config.output) / config.name
    with tempfile.TemporaryDirectory() as temporary:
        if not setup.rows_folder(config).exists():
            config = config.model_copy(update={"data": config.data.model_copy(update={"folder": f"{temporary}/rows"})})
        data_folder = setup.prepare_rows(config, None if target is None else target.tokenizer)
        accelerator = setup.start_processes(config, folder)
        target = target or setup.load_for_training(config, accelerator.device)
        splits = setup.load_splits(config, target, data_folder, folder, accelerator, console, is_dry=True)
        return assemble(config, target, data_folder, accelerator, console, *splits)


def assemble(
    config: RunConfig,
    target: Target,
    data_folder: Path,
    accelerator: Accelerator,
    console: Console,
    train: setup.Split,
    validation: setup.Split,
) -> Run:
    """The run of these rows: draft, loss, stages, optimizers. Writes nothing."""
    folder = Path(config.output) / config.name
    draft = setup.build_draft(config, target, train.rows)
    head = DistillHead.build(train.features.head.weight, draft.draft_vocab, target.logit_scale)
    global_batch_size = config.loop.batch_size * accelerator.num_processes * config.loop.gradient_accumulation
    stages = plan_stages(config, steps_per_epoch=-(-len(train.rows) // global_batch_size))
    measured = measured_config(stages)
    module = Distillation(
        draft,
        head,
        setup.loss_weights(measured),
        measured.align.steps,
        config.loop.rows_per_chunk,
        setup.autocast_dtype(config),
        config.loop.compile,
    )
    model = parallel(module, accelerator)
    course = Course(module, stages)
    identity = {
        **config.model_dump(mode="json", include={"seed", "draft", "align", "optimizer", "stages"}),
        "target": fingerprint(target),
        "mixed_precision": config.loop.mixed_precision,
        "rows": train.sizes.digest,
        "global_batch_size": global_batch_size,
        "total_steps": course.total_steps,
    }
    return Run(
        config=config,
        folder=folder,
        data_folder=data_folder,
        accelerator=accelerator,
        console=console,
        module=module,
        model=model,
        course=course,
        train=train,
        validation=validation,
        checkpoints=Checkpoints(folder, config.loop.keep),
        log=MetricsLog(folder, config, accelerator, console),
        measured=measured,
        global_batch_size=global_batch_size,
        identity=identity,
        data_facts=_data_facts(train, draft),
    )


def _data_facts(train: setup.Split, draft: Draft) -> dict[str, Any]:
    facts: dict[str, Any] = {"rows": train.sizes.digest}
    if draft.draft_vocab is not None:  # of these rows also where it was chosen from others, with `draft.init_from`
        coverage = vocab_coverage(train.rows, draft.draft_vocab, draft.target.vocab_size)
        facts["draft_vocab"] = {"size": len(draft.draft_vocab), "coverage": coverage}
    return facts
