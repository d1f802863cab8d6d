"""What a run needs before its first step: rows, processes, the target, features, the draft."""

import logging
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from draftwood.configs.schema import RunConfig
from draftwood.decode.prompts import PromptSet, prompts_from_rows
from draftwood.kernels.distill_loss import DistillHead, DistillWeights
from draftwood.models.assets import cache_root
from draftwood.models.checkpoint import load_draft
from draftwood.models.draft_base import Draft
from draftwood.models.draft_kinds import KINDS
from draftwood.models.target import Target, load_target, load_tokenizer
from draftwood.train.batches import RowSizes, check_draft_vocab_size, each_row, frequent_tokens
from draftwood.train.compiled import check_compiler
from draftwood.train.features import FeatureCache, FeatureError, FeatureSource, open_cache
from draftwood.train.fingerprint import check_token_ids
from draftwood.train.prepare import load_rows, prepare
from draftwood.train.sharding import is_sharded
from draftwood.train.tracking import check_tracker
from draftwood.train.turns import TurnPolicy

# Longer than any extraction of features that one process may have to wait for.
_PATIENCE = timedelta(hours=24)
_STRATEGIES = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """Rows of one kind and where their features come from."""

    rows: Dataset
    sizes: RowSizes
    features: FeatureSource


def rows_folder(config: RunConfig) -> Path:
    """Where the prepared rows of `config` are, or will be."""
    data, name = config.data, config.target.name
    sources = "+".join(Path(source.path).stem for source in data.source)[:60]
    folder = f"{sources}-{Path(name).name}-{_settings_name(config)}"
    return Path(data.folder or cache_root() / "rows" / folder)


def prepare_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """The folder of prepared rows that `config` asks for; the first process here makes it, the others wait.

    Raises:
        ValueError: the target has no tokenizer, or as `prepare`.
    """
    name = config.target.name
    if tokenizer is None:
        tokenizer = load_tokenizer(name)
    data = config.data
    folder = rows_folder(config)
    prepare(
        data.source,
        tokenizer,
        folder,
        max_length=data.max_length,
        num_validation=data.num_validation,
        min_length=data.min_length,
        long_rows=data.long_rows,
        seed=config.seed,
        policy=TurnPolicy(system=data.system),
        limit=data.limit,
        num_proc=data.num_proc,
    )
    return folder


def check_machine(config: RunConfig) -> None:
    """That what the run asks for is here, before anything is prepared, which may take long.

    Raises:
        ValueError: a device that is not there, or `loop.compile` without a compiler.
        ImportError: a tracker that is not installed.
    """
    check_tracker(config.loop.tracker)
    if config.target.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("target.device is cuda, but no GPU is visible to torch; use auto or cpu")
    if config.loop.compile:
        check_compiler(torch.device("cpu" if _is_on_cpu(config) else "cuda"))


def _is_on_cpu(config: RunConfig) -> bool:
    return config.target.device == "cpu" or not torch.cuda.is_available()


def start_processes(config: RunConfig, run_folder: Path) -> Accelerator:
    """Joins the process group that `accelerate launch` or torchrun set up, if any; after `check_machine`.

    Raises:
        ValueError: a strategy other than DDP and FSDP, or other settings of FSDP than the draft's.
    """
    tracker = config.loop.tracker
    is_sharded()  # which checks its settings, before accelerate reads them
    accelerator = Accelerator(
        cpu=_is_on_cpu(config),
        log_with=None if tracker == "none" else tracker,
        project_dir=run_folder,
        # Accumulation and autocast are the loop's own, whatever the launcher's configuration says of them.
        gradient_accumulation_steps=1,
        mixed_precision="no",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=_PATIENCE),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    if accelerator.distributed_type not in _STRATEGIES:
        raise ValueError(
            f"a draft is trained data-parallel; {accelerator.distributed_type} is not supported, "
            "use an accelerate configuration with MULTI_GPU, MULTI_CPU or FSDP"
        )
    return accelerator


def load_for_training(config: RunConfig, device: torch.device) -> Target:
    """The target of `config` on `device`, in the dtype asked for."""
    dtype = None if config.target.dtype == "auto" else config.target.dtype
    return load_target(config.target.name, dtype=dtype, device=device)


def limit_tokens(rows: Dataset, max_tokens: int | None) -> Dataset:
    """The first rows with `max_tokens` tokens in all, at least one row; all of them for None."""
    if max_tokens is None:
        return rows
    total = 0
    for i, (ids, _) in enumerate(each_row(rows)):
        total += len(ids)
        if total >= max_tokens:
            return rows.select(range(i + 1))
    return rows


def load_split(config: RunConfig, data_folder: Path, name: str) -> Dataset:
    """Rows of `train` (as many as `data.train_tokens` allows) or `validation`."""
    rows = load_rows(data_folder, name).select_columns(["input_ids", "loss_mask"]).with_format("numpy")
    return limit_tokens(rows, config.data.train_tokens) if name == "train" else rows


def held_out_prompts(config: RunConfig, data_folder: Path) -> PromptSet:
    """The prompts of the validation rows, as `evaluate` asks for them."""
    settings = config.evaluate
    rows = load_rows(data_folder, "validation")
    return prompts_from_rows(rows, "validation", limit=settings.num_prompts, max_tokens=settings.max_prompt_tokens)


def build_draft(config: RunConfig, target: Target, rows: Dataset) -> Draft:
    """An untrained float32 draft, the same on every process, or the one in `draft.init_from`.

    The latter keeps its vocabulary where the size asked for is that of its own; another is chosen anew from `rows`.
    """
    size = config.draft.draft_vocab_size
    if config.draft.init_from is not None:
        draft = load_draft(config.draft.init_from, target).float().train()
        _check_same_draft(config, draft)
        if size is not None and size != len(draft.head_weight):
            draft.take_vocab(frequent_tokens(rows, size, target.vocab_size))
    else:
        draft_vocab = None if size is None else frequent_tokens(rows, size, target.vocab_size)
        torch.manual_seed(config.seed)
        kind, options = _kind(config)
        draft = kind.from_target(target, draft_vocab=draft_vocab, **options).train()
    draft.detaches = config.align.detach
    return draft


def check_draft(config: RunConfig, target: Target) -> None:
    """That the draft of `build_draft` can be made, as far as that does not depend on the rows.

    A draft in `draft.init_from` is loaded for it, and left again; loading taps the target where it reads hidden states.

    Raises:
        FileNotFoundError, ValueError: a `draft.draft_vocab_size` that the target is too small for, or a draft that is
            not there, of another target or made with other settings.
    """
    size = config.draft.draft_vocab_size
    if size is not None:
        check_draft_vocab_size(size, target.vocab_size)
    if config.draft.init_from is not None:
        _check_same_draft(config, load_draft(config.draft.init_from, target))


def _kind(config: RunConfig) -> tuple[type[Draft], dict[str, Any]]:
    """The kind of draft asked for, and the options it takes."""
    kind = KINDS[config.draft.kind]
    return kind, {name: getattr(config.draft, name) for name in kind.option_names}


def _check_same_draft(config: RunConfig, draft: Draft) -> None:
    """Raises:
    ValueError: a draft.* setting that the draft of `draft.init_from` was not made with and cannot be changed to.
    """
    made = {"kind": draft.kind, **draft.options}
    if draft.own_head is not None or config.draft.draft_vocab_size is None:
        made["draft_vocab_size"] = None if draft.draft_vocab is None else len(draft.draft_vocab)
    for name, value in made.items():
        asked = getattr(config.draft, name)
        if asked != value and not (name == "taps" and asked is None):
            raise ValueError(
                f"draft.{name} is {asked}, but the draft in draft.init_from ({config.draft.init_from}) has {value}; "
                f"set draft.{name}={value} to go on from it"
            )


def loss_weights(config: RunConfig) -> DistillWeights:
    align = config.align
    return DistillWeights(
        align.feature_weight,
        align.ce_weight,
        align.topk_weight,
        align.topk,
        align.step_weights,
        align.acceptance_weight,
        align.acceptance_eta,
    )


def autocast_dtype(config: RunConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.loop.mixed_precision == "bf16" else None


def load_splits(
    config: RunConfig,
    target: Target,
    data_folder: Path,
    run_folder: Path,
    accelerator: Accelerator,
    console: Console,
    is_dry: bool = False,
) -> tuple[Split, Split]:
    """Training and validation rows, their features computed or read as configured; all processes take part.

    Args:
        is_dry: say how large a cache would be, and neither open nor fill it.

    Raises:
        FeatureError: stale features in a folder of the user's, too little disk, or folders that are not shared.
        FileNotFoundError, ValueError: rows with tokens that the target lacks; or as `check_draft`.
    """
    check_token_ids(data_folder, target.vocab_size)
    if config.draft.init_from is None:  # a draft that is gone on with taps the target as it was trained
        kind, options = _kind(config)
        kind.prepare_target(target, **options)
    check_draft(config, target)  # here, as features may take hours
    precision, compiled = autocast_dtype(config), config.loop.compile
    head = DistillHead.build(target.head_weight, None, target.logit_scale, precision)
    left, splits = config.features.max_gb, []
    for name in ("validation", "train"):
        rows = load_split(config, data_folder, name)
        sizes, source = RowSizes.of(rows), FeatureSource(target, rows, head, precision, compiled=compiled)
        folder = Path(config.features.folder or run_folder / "features") / name
        if config.features.source == "cached" and is_dry:
            planned = FeatureCache(folder, sizes.lengths, target.feature_dim, left * 1e9)
            left -= planned.num_tokens * planned.bytes_per_token / 1e9
            console.print(f"{name} {planned.describe()}", highlight=False, soft_wrap=True)
        elif config.features.source == "cached":
            with accelerator.main_process_first():
                cache = open_cache(folder, target, sizes, precision, left, rebuild=config.features.folder is None)
            left -= cache.num_tokens * cache.bytes_per_token / 1e9
            if accelerator.is_main_process:
                console.print(cache.describe(), highlight=False, soft_wrap=True)
            cache.fill(
                source,
                config.features.tokens_per_batch,
                accelerator.process_index,
                accelerator.num_processes,
                console if accelerator.is_main_process else None,
            )
            accelerator.wait_for_everyone()
            if missing := cache.missing():
                raise FeatureError(
                    f"{folder}: process {accelerator.process_index} lacks {len(missing)} files that others wrote; set "
                    "features.folder to a folder that all processes share"
                )
            source = FeatureSource(target, rows, head, precision, cache, compiled)
        splits.append(Split(rows, sizes, source))
    return splits[1], splits[0]


def _settings_name(config: RunConfig) -> str:
    data = config.data
    parts = [f"{data.max_length}", f"{data.num_validation}", f"s{config.seed}"]
    if data.limit is not None:
        parts.append(f"n{data.limit}")
    if data.system != "keep":
        parts.append(data.system)
    if data.min_length:
        parts.append(f"from{data.min_length}")
    if data.long_rows != "clip":
        parts.append(data.long_rows)
    if len(data.source) > 1 or data.source[0].weight != 1 or data.source[0].split is not None:
        weights = [(source.path, source.split, source.weight) for source in data.source]
        parts.append(sha256(repr(weights).encode()).hexdigest()[:8])
    return "-".join(parts)
