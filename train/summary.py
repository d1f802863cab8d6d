"""What a run prints before its first step: what is frozen, tied and trained, how long it is, what it needs."""

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import FSDPModule

from draftwood.configs.schema import RunConfig
from draftwood.kernels.distill_loss import chunk_rows
from draftwood.models.harmony import BLOCK
from draftwood.models.target import Target
from draftwood.train.batches import padding_share
from draftwood.train.mask_view import mask_view
from draftwood.train.run import Run, set_up_dry
from draftwood.train.stages import Stage

GB = 1e9


def announce(run: Run, step: int) -> None:
    """Prints the table, on the main process."""
    if run.accelerator.is_main_process:
        table = Table(title=f"draftwood distill: {run.config.name}", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for row in describe(run, step):
            table.add_row(*row)
        run.console.print(table)


def dry_run(config: RunConfig, target: Target | None = None, console: Console | None = None) -> None:
    """Prints what `distill` would do, and its first row with what of it is trained. Trains and writes nothing.

    Raises:
        ValueError, ImportError: as `distill`, of what it checks before training.
    """
    run = set_up_dry(config, target, console or Console())
    announce(run, 0)
    if run.accelerator.is_main_process:
        row = run.train.rows[0]
        run.console.print(mask_view(row["input_ids"], row["loss_mask"], run.train.features.target.tokenizer))


def describe(run: Run, step: int) -> list[tuple[str, str]]:
    """The table's rows: a name and a text each."""
    config, draft, target = run.config, run.module.draft, run.train.features.target
    parts = ", ".join(
        f"{name} {_millions(sum(p.numel() for p in m.parameters()))}" for name, m in draft.named_children()
    )
    said = f"{target.vocab_size:,} tokens"
    if draft.draft_vocab is not None:
        coverage = run.data_facts["draft_vocab"]["coverage"]
        said = f"{len(draft.draft_vocab):,} of its tokens, {coverage:.2%} of those in the replies of the rows"
    tied = "embedding and head are" if draft.own_head is None else "embedding is"
    processes = run.accelerator.num_processes
    shares = "; in shares, one on each process" if isinstance(run.model, FSDPModule) else ""
    frozen = _millions(sum(p.numel() for p in target.model.parameters()))
    threads = f", {torch.get_num_threads()} CPU threads each" if run.accelerator.device.type == "cpu" else ""
    return [
        ("frozen", f"target {target.name}, {frozen} parameters, {target.dtype}, {target.device}"),
        ("tied", f"the draft's {tied} the target's, for {said}; never in a checkpoint"),
        ("trained", f"draft {_millions(_trained(run))} parameters: {parts}{shares}"),
        ("rows", f"{len(run.train.rows):,} of {run.train.sizes.lengths.sum():,} tokens, "
                 f"{run.train.sizes.supervised.sum():,} supervised; {len(run.validation.rows):,} held out"),
        ("batch", f"{run.global_batch_size} rows = {config.loop.batch_size} x {processes} processes x "
                  f"{config.loop.gradient_accumulation} accumulated{threads}; {_padding(run):.1%} padding"),
        ("steps", f"{run.total_steps:,} of the optimizer, {step:,} done; {config.loop.mixed_precision} autocast"
                  f"{', compiled' if config.loop.compile else ''}"),
        *((f"from step {stage.start:,}", _stage(stage)) for stage in run.course.stages),
        ("memory", f"about {training_bytes(run) / GB:.2f} GB per process beside the target's {_size(target):.2f} GB"),
        ("disk", f"about {checkpoint_bytes(run) / GB:.2f} GB of checkpoints and the best draft, beside the features"),
        ("folder", f"{run.folder}; a checkpoint every {config.loop.save_every} steps, {config.loop.keep} kept"),
    ]  # fmt: skip


def training_bytes(run: Run) -> float:
    """An estimate: weights, gradients and moments, the activations of the longest batch, and one chunk of logits."""
    config, shape = run.config, run.module.draft.config.shape
    kept = 2 + _moments(run)  # weights, gradients, moments
    if isinstance(run.model, FSDPModule):  # within a step the first two are whole beside their shares
        kept = 2 + kept / run.accelerator.num_processes
    weights = 4 * _trained(run) * kept
    width = 2 if config.loop.mixed_precision == "bf16" else 4
    longest = int(run.train.sizes.lengths.max())
    rows = config.loop.batch_size * longest
    # per row and align step: norms and residuals in float32, projections and the feed-forward layer in `width` bytes
    per_row = 4 * 10 * shape.hidden_dim + width * (4 * shape.hidden_dim + 4 * shape.intermediate_dim)
    scores = 3 * 4 * config.loop.batch_size * shape.num_heads * longest * min(longest, BLOCK)
    activations = run.measured.align.steps * (rows * per_row * run.module.draft.config.num_layers + scores)
    vocab = run.module.head.draft_weight.shape[0]
    logits = min(config.loop.rows_per_chunk or chunk_rows(run.module.head.weight.shape[0]), 4 * rows) * vocab * width
    return float(weights + activations + logits)


def checkpoint_bytes(run: Run) -> float:
    """On disk: the kept checkpoints and one being written, of weights and moments, and the best draft."""
    return float(4 * _trained(run) * ((run.config.loop.keep + 1) * (1 + _moments(run)) + 1))


def _moments(run: Run) -> int:
    return max(1 if s.config.optimizer.name == "muon" else 2 for s in run.course.stages)


def _size(target: Target) -> float:
    return sum(p.numel() * p.element_size() for p in target.model.parameters()) / GB


def _stage(stage: Stage) -> str:
    align, optimizer = stage.config.align, stage.config.optimizer
    steps = "1 align step" if align.steps == 1 else f"{align.steps} align steps"
    if not align.detach:
        steps += ", gradients through them"
    eta = "" if align.acceptance_eta is None else f" (eta {align.acceptance_eta:g})"
    weights = {
        "feature": align.feature_weight,
        "cross-entropy": align.ce_weight,
        f"Top-{align.topk}": align.topk_weight,
        f"acceptance{eta}": align.acceptance_weight,
    }
    terms = " + ".join(f"{weight:g} {name}" for name, weight in weights.items() if weight) or "no loss term"
    rates = f"{optimizer.lr:g}"
    if optimizer.name == "muon":
        rates = f"{optimizer.muon_lr:g} on matrices, adamw {optimizer.lr:g}"
    return (
        f"{steps}; {terms}; {optimizer.name} {rates}, "
        f"{optimizer.schedule} over steps {stage.schedule_start:,} to {stage.schedule_end:,}"
    )


def _padding(run: Run) -> float:
    loop = run.config.loop
    return padding_share(
        run.train.sizes.lengths,
        loop.batch_size,
        run.accelerator.num_processes,
        loop.gradient_accumulation,
        run.config.seed,
    )


def _trained(run: Run) -> int:
    return sum(p.numel() for p in run.module.parameters() if p.requires_grad)


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
