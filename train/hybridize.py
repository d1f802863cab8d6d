"""Makes a Llama-style model hybrid: attention layers replaced by Mamba-2 mixers, distilled from the model itself.

Two stages, as in MOHAWK (arXiv 2408.10189) and MambaInLlama (arXiv 2408.15237):

    fit      every mixer learns its own attention layer's outputs from its inputs in the original model, all at once
    distil   the hybrid as a whole learns the original's next-token distribution (KL), and its mixers go on learning
             what their attention layers gave; only the mixers train

`auto:<n>` replaces the n layers whose mixers, each alone in the original model, change its distribution least.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import TextColumn
from torch import Tensor, nn

from draftwood.configs.schema import SourceConfig
from draftwood.models.assets import cache_root
from draftwood.models.fingerprint import fingerprint
from draftwood.models.hybrid import build_hybrid, hybrid_config, replaced
from draftwood.models.target import Target, load_config, load_target, load_tokenizer
from draftwood.train.checkpoints import package_versions
from draftwood.train.compiled import check_compiler
from draftwood.train.hybrid_stages import Agreement, Distilling, Fitting, Mixers, agreement, lean_precision, measure
from draftwood.train.loop import Stopped
from draftwood.train.prepare import load_rows, prepare
from draftwood.train.sources import open_sources
from draftwood.train.token_blocks import TokenBlocks
from draftwood.train.tracking import StopRequest, check_tracker, keep_lines

_STATE = "training.pt"
_STAGES = ("select", "fit", "distil", "done")
# Settings that may change when a run goes on.
_FREE = ("save_every", "evaluate_blocks", "compile")
_MOST_HELD_OUT = 200  # conversations, where their number is not given


@dataclass(frozen=True)
class HybridizeConfig:
    """How a hybrid is trained.

    Attributes:
        layers: those to replace; `num_auto` instead chooses so many.
        fit_tokens, select_tokens, distil_tokens: of the stages, all processes together; the choice comes after the
            first `select_tokens` of the fit.
        length: tokens of a block; batch_size: blocks of a step, all processes together.
        mixer_weight: of the mixers' errors beside the KL.
        compile: the layers through `torch.compile`; the values change by rounding.

    Raises:
        ValueError: a number out of its range, or not one of `layers` and `num_auto`.
    """

    layers: tuple[int, ...] = ()
    num_auto: int = 0
    fit_tokens: int = 400_000
    select_tokens: int = 120_000
    distil_tokens: int = 1_200_000
    length: int = 256
    batch_size: int = 4
    lr: float = 1e-3
    distil_lr: float = 5e-4
    mixer_weight: float = 1.0
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    save_every: int = 50
    evaluate_blocks: int = 64
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        if bool(self.layers) == (self.num_auto > 0):
            raise ValueError(f"layers is {self.layers} and num_auto {self.num_auto}: expected one of them")
        for name in ("length", "batch_size", "save_every", "evaluate_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")
        for name in ("fit_tokens", "select_tokens", "distil_tokens", "warmup_steps", "seed", "mixer_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")
        for name in ("lr", "distil_lr", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected more than 0")

    def check_model(self, model: Any) -> None:
        """Raises:
        ValueError: the layers are not some of those that transformers configuration `model` has, or it is no Llama's.
        """
        hybrid_config(model, self.layers or (0,))
        count = model.num_hidden_layers
        if self.num_auto >= count:
            raise ValueError(
                f"layers auto:{self.num_auto}: the model has {count} layers and keeps attention in at least one: "
                f"expected auto:{count - 1} at most"
            )


def chosen_layers(text: str) -> tuple[tuple[int, ...], int]:
    """`1,3,5` as ((1, 3, 5), 0), `auto:15` as ((), 15).

    Raises:
        ValueError: neither form.
    """
    kind, colon, number = text.partition(":")
    try:
        if colon and kind == "auto" and int(number) > 0:
            return (), int(number)
        return tuple(sorted({int(part) for part in text.split(",")})), 0
    except ValueError:
        raise ValueError(f"layers {text!r}: expected numbers such as 1,3,5, or auto:<how many>") from None


@dataclass
class Progress:
    """Where a run is and what it has found; saved with the weights.

    Attributes:
        stage: select, fit, distil or done; `step`: of that stage.
        alone_kl: KL of each candidate layer's mixer alone in the original, where layers were chosen.
    """

    stage: str
    step: int = 0
    layers: list[int] = field(default_factory=list)
    alone_kl: dict[int, float] = field(default_factory=dict)
    batches: int = 0


class Hybridizer:
    """One run in folder `out`; `run` goes on from where the last one there stopped.

    Raises:
        ValueError: `out` was begun with other settings, rows or weights, or its state is damaged; the processes do not
            share a batch evenly; layers that do not fit the model.
    """

    def __init__(self, target: Target, train: Dataset, validation: Dataset, out: Path, config: HybridizeConfig,
                 accelerator: Accelerator, log: Callable[[str, int, dict[str, float]], None]):  # fmt: skip
        self.config, self.out, self.accelerator, self.log = config, out, accelerator, log
        model: Any = target.model
        config.check_model(model.config)
        if config.batch_size % accelerator.num_processes:
            raise ValueError(
                f"batch_size is {config.batch_size}, expected a multiple of the {accelerator.num_processes} processes"
            )
        self.model = model.to(accelerator.device).eval().requires_grad_(False)
        self.blocks = TokenBlocks(train, config.length, config.seed)
        self.held_out = TokenBlocks(validation, config.length, config.seed, "held-out rows")
        candidates = config.layers or tuple(range(model.config.num_hidden_layers))
        self.progress = Progress("fit" if config.layers else "select", layers=list(candidates))
        self.identity = {
            **{name: value for name, value in asdict(config).items() if name not in _FREE},
            "target": fingerprint(target),
            "rows": f"{self.blocks.digest}{self.held_out.digest}",
        }
        self.saved = self._load()
        torch.manual_seed(config.seed)
        self.mixers = Mixers(model, self.progress.layers).to(accelerator.device)
        if self.saved is not None:
            self.mixers.load_state_dict(self.saved["mixers"])

    def run(self, stop: StopRequest) -> Any:
        """The hybrid, or None where `stop` ended the run early; what was done is saved."""
        config = self.config
        tokens = config.length * config.batch_size
        if self.progress.stage == "select":
            if not self._train("select", config.select_tokens // tokens, stop):
                return None
            self._choose()
        if self.progress.stage == "fit":
            left = config.fit_tokens - (0 if config.layers else config.select_tokens)
            if not self._train("fit", left // tokens, stop):
                return None
            self._enter("distil")
        if self.progress.stage == "distil" and not self._train("distil", config.distil_tokens // tokens, stop):
            return None
        self._enter("done")
        return build_hybrid(self.model, {i: m.state_dict() for i, m in self._mixers().items()})

    def _mixers(self) -> dict[int, nn.Module]:
        return dict(zip(self.mixers.layers, self.mixers.mixers, strict=True))

    def _enter(self, stage: str) -> None:
        self.progress.stage, self.progress.step, self.saved = stage, 0, None
        self._save(None)

    def _train(self, stage: str, steps: int, stop: StopRequest) -> bool:
        """Trains to step `steps` of `stage`; False where `stop` came first."""
        config, accelerator, progress = self.config, self.accelerator, self.progress
        loss: nn.Module
        if stage == "distil":
            loss = Distilling(self.model, self._mixers(), config.mixer_weight, config.compile)
        else:
            loss = Fitting(self.model, self.mixers)
        if isinstance(loss, Fitting) and progress.batches == 0:
            with lean_precision(self.accelerator.device.type), torch.no_grad():
                loss.scale(self._batch())
        trained = accelerator.prepare(loss) if accelerator.num_processes > 1 else loss
        parameters = [p for p in self.mixers.parameters() if p.requires_grad]
        lr = config.distil_lr if stage == "distil" else config.lr
        optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        if self.saved is not None and self.saved["optimizer"] is not None:
            optimizer.load_state_dict(self.saved["optimizer"])
            self.saved = None
        started = perf_counter()
        while progress.step < steps:
            with lean_precision(self.accelerator.device.type):
                figures = trained(self._batch())
            accelerator.backward(figures["loss"])
            norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = lr * _schedule(progress.step, steps, config.warmup_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.step += 1
            progress.batches += 1
            seconds, started = perf_counter() - started, perf_counter()
            self.log(stage, steps, {"step": progress.step, "norm": float(norm), "seconds": seconds,
                                    **{k: float(v.detach()) for k, v in figures.items()}})  # fmt: skip
            stopped = stop.is_requested()
            if progress.step % config.save_every == 0 or stopped:
                self._save(optimizer)
            if stopped:
                return False
        return True

    def _batch(self) -> Tensor:
        ids = self.blocks.batch(self.progress.batches, self.config.batch_size)
        share = ids[self.accelerator.process_index :: self.accelerator.num_processes]
        return share.to(self.accelerator.device)

    def _choose(self) -> None:
        """Keeps the layers whose mixers alone change the original least."""
        blocks = self.held_out.batch(0, min(8, len(self.held_out))).to(self.accelerator.device)
        with torch.no_grad(), lean_precision(self.accelerator.device.type):
            wanted = self.model(blocks, use_cache=False).logits
            for layer, mixer in self._mixers().items():
                with replaced(self.model.model.layers[layer].self_attn, mixer):
                    found = agreement(wanted, self.model(blocks, use_cache=False).logits)
                self.progress.alone_kl[layer] = found.kl
        best = sorted(self.progress.alone_kl, key=lambda i: self.progress.alone_kl[i])[: self.config.num_auto]
        self.mixers.keep(sorted(best))
        self.progress.layers = sorted(best)
        self._enter("fit")

    def _save(self, optimizer: torch.optim.Optimizer | None) -> None:
        if not self.accelerator.is_main_process:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        partial = self.out / f".partial-{_STATE}"
        state = {
            "identity": self.identity,
            "progress": asdict(self.progress),
            "mixers": self.mixers.state_dict(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
        }
        torch.save(state, partial)
        partial.replace(self.out / _STATE)

    def _load(self) -> dict[str, Any] | None:
        path = self.out / _STATE
        if not path.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            identity, progress = state["identity"], Progress(**state["progress"])
        except Exception as error:  # the unpickler raises anything
            raise ValueError(f"{path} is damaged ({type(error).__name__}): delete it to begin the run again") from None
        for key, value in identity.items():  # in a file of an earlier version without target and rows
            now = self.identity.get(key)
            if json.dumps(value) != json.dumps(now):
                differs = f"other {key}" if key in ("target", "rows") else f"{key}={value}, not {now}"
                raise ValueError(f"{path}: was begun with {differs}; give another --out, or the same settings")
        self.progress = progress
        return state


def _schedule(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, constant, and down to zero over the last half."""
    return min(1.0, (step + 1) / max(1, warmup), 2 * (steps - step) / max(1, steps))


def hybridize(
    target: str,
    source: str,
    out: Path,
    config: HybridizeConfig,
    *,
    data_folder: Path | None = None,
    max_length: int = 1024,
    num_validation: int | None = None,
    num_proc: int = 2,
    tracker: str = "none",
    console: Console,
) -> Agreement | None:
    """Writes a plain `BambaForCausalLM` folder into `out`, with `hybrid.json` beside it; None but on the main process.

    Args:
        target: built-in name, folder or hub id of a Llama-style model.
        source: conversations, as `prepare` takes them; every token of them is trained on.
        data_folder: prepared rows, made here if they are not there; None: in the cache folder.
        num_validation: conversations held out; None: a tenth of them, 200 at most.

    Raises:
        Stopped: it was asked to stop; what was done is saved.
        ValueError: an architecture or layers that do not fit, or as `Hybridizer` and `prepare`; `compile` without a
            C++ compiler on a CPU.
        ImportError: a tracker that is not installed.
    """
    check_tracker(tracker)
    config.check_model(load_config(target))
    tokenizer = load_tokenizer(target)
    if num_validation is None:
        num_validation = _held_out(source)
    folder = data_folder or cache_root() / "rows" / _rows_name(source, target, max_length, num_validation)
    prepare(source, tokenizer, folder, max_length=max_length, num_validation=num_validation, num_proc=num_proc)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else several processes on a CPU each take themselves for the only one
        mixed_precision="no",
        log_with=None if tracker == "none" else tracker,
        project_dir=out,
    )
    if config.compile:
        check_compiler(accelerator.device)
    if tracker != "none":
        accelerator.init_trackers("draftwood-hybridize", asdict(config))
    loaded = load_target(target, dtype="bfloat16", device=accelerator.device)
    out.mkdir(parents=True, exist_ok=True)
    with StopRequest(accelerator) as stop, _Shown(console, accelerator, out / "metrics.jsonl") as shown:
        run = Hybridizer(
            loaded, load_rows(folder, "train"), load_rows(folder, "validation"), out, config, accelerator, shown.log
        )
        shown.start_at(run.progress)
        hybrid = run.run(stop)
    if tracker != "none":
        accelerator.end_training()
    if hybrid is None:
        raise Stopped(out / _STATE)
    if not accelerator.is_main_process:
        return None
    hybrid.save_pretrained(out)
    tokenizer.save_pretrained(out)
    with torch.compiler.set_stance("force_eager"):
        found = measure(
            run.model.float().cpu(), hybrid, run.held_out.batch(0, min(config.evaluate_blocks, len(run.held_out)))
        )
    record = {
        "made_from": target,
        "source": source,
        "recipe": asdict(config),
        "layers": run.progress.layers,
        "alone_kl": run.progress.alone_kl,
        "held_out": {"kl_nats": found.kl, "top1_agreement": found.top1, "blocks": config.evaluate_blocks},
        "versions": package_versions(),
    }
    (out / "hybrid.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return found


def _held_out(source: str) -> int:
    """A tenth of the conversations of `source`, `_MOST_HELD_OUT` at most."""
    count = sum(1 for one in open_sources(source) for _ in islice(one.rows(), 10 * _MOST_HELD_OUT))
    return max(1, min(_MOST_HELD_OUT, count // 10))


def _rows_name(source: str, target: str, max_length: int, num_validation: int) -> str:
    """Of the folder of prepared rows; a hash tells sources and targets of one name apart."""
    given = SourceConfig.parse(source)
    places = [str(Path(name).resolve()) if Path(name).exists() else name for name in (given.path, target)]
    digest = sha256(repr((places, given.split, given.weight)).encode()).hexdigest()[:8]
    return f"{Path(given.path).stem}-{Path(target).name}-{max_length}-{num_validation}-hybridize-{digest}"


class _Shown:
    """Every step into a JSON Lines file and the trackers, the latest on the console; by the main process."""

    def __init__(self, console: Console, accelerator: Accelerator, path: Path):
        self.accelerator, self.path = accelerator, path
        columns = (*RichProgress.get_default_columns(), TextColumn("{task.fields[figures]}"))
        self.progress = RichProgress(*columns, console=console, disable=not accelerator.is_main_process)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> "_Shown":
        self.progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.stop()

    def start_at(self, progress: Progress) -> None:
        """Goes on after `progress`: what an earlier run logged beyond its last checkpoint is taken out."""
        if not self.accelerator.is_main_process or not self.path.is_file():
            return
        done = (_STAGES.index(progress.stage), progress.step)
        keep_lines(self.path, lambda row: (_STAGES.index(row["stage"]), row["step"]) <= done)

    def log(self, stage: str, total: int, figures: dict[str, float]) -> None:
        if not self.accelerator.is_main_process:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": stage, **figures}) + "\n")
        self.accelerator.log({f"{stage}/{name}": value for name, value in figures.items()})
        if stage not in self.tasks:
            self.tasks[stage] = self.progress.add_task(stage, total=total, figures="")
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "step")
        self.progress.update(self.tasks[stage], completed=figures["step"], figures=shown)
