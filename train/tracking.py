"""What a run reports while it goes: metrics.jsonl, the console, an optional tracker; and how it is asked to stop."""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftwood.configs.schema import RunConfig
from draftwood.train.metrics import Metrics

METRICS_FILE, CONFIG_FILE = "metrics.jsonl", "config.json"


class MetricsLog:
    """One JSON object per line and event in `metrics.jsonl`; a line on the console; the tracker, if one is configured.

    Only the main process writes.
    """

    def __init__(self, folder: Path, config: RunConfig, accelerator: Accelerator, console: Console):
        self.path = folder / METRICS_FILE
        self._accelerator = accelerator
        self._console = console
        self._config = config
        self._seconds, self._rows = 0.0, 0
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        is_shown = accelerator.is_main_process and console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=not is_shown)

    def start_at(self, step: int, total_steps: int) -> None:
        """Begins or goes on after `step`: what an earlier run logged beyond its last checkpoint is taken out."""
        if not self._accelerator.is_main_process:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        config = self._config.model_dump(mode="json")
        (self.path.parent / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        self.path.touch()
        keep_lines(self.path, lambda row: row["step"] <= step)
        self._task = self._progress.add_task("", total=total_steps, completed=step)
        self._progress.start()
        if self._config.loop.tracker != "none":
            flat = _flat(config)
            self._accelerator.init_trackers(self._config.loop.project, flat, _tracker_options(self._config))

    def count_step(self, seconds: float, num_rows: int) -> None:
        """Counts one optimizer step, its time and supervised rows, for the rate of the next line."""
        if self._accelerator.is_main_process:
            self._progress.advance(self._task)
        self._seconds += seconds
        self._rows += int(num_rows)

    def training(self, step: int, epoch: int, lr_factor: float, grad_norm: float, metrics: Metrics) -> None:
        rate = self._rows / max(self._seconds, 1e-9)
        self._seconds, self._rows = 0.0, 0
        facts = {"lr_factor": lr_factor, "grad_norm": grad_norm, "rows_per_second": round(rate, 1)}
        self._write("train", step, epoch, metrics, facts | {"peak_memory_gb": round(_peak_memory_gb(), 3)})

    def validation(self, step: int, epoch: int, metrics: Metrics) -> None:
        self._write("validation", step, epoch, metrics, {})

    def decoded(self, step: int, epoch: int, facts: dict[str, Any]) -> None:
        """What decoding prompts with the draft of this step gave, on the main process alone."""
        self._append("decode", step, epoch, facts)
        self._track({f"decode/{key}": value for key, value in facts.items() if isinstance(value, float)}, step)
        low, high = facts["acceptance_length_interval"]
        self._console.print(
            f"    decode step {step:>6}  acceptance {facts['acceptance_length']:.3f} ({low:.3f} to {high:.3f}) of "
            f"{facts['num_prompts']} prompts",
            highlight=False,
            soft_wrap=True,
        )

    def close(self) -> None:
        self._progress.stop()
        for tracker in self._accelerator.trackers:  # not `end_training`, which ends the process group too
            tracker.finish()

    def _write(self, kind: str, step: int, epoch: int, metrics: Metrics, facts: dict[str, float]) -> None:
        if not self._accelerator.is_main_process:
            return
        self._append(kind, step, epoch, facts | metrics.to_dict())
        self._track(metrics.flat(kind) | {f"{kind}/{k}": v for k, v in facts.items()}, step)
        hits = "  ".join(f"{a.top1:.3f}/{a.top3:.3f}" for a in metrics.align)
        rate = f"  {facts['rows_per_second']:,.0f} rows/s" if "rows_per_second" in facts else ""
        self._console.print(
            f"{kind:>10} step {step:>6}  loss {metrics.loss:.4f}  acceptance {metrics.acceptance_length:.3f}  "
            f"top-1/top-3 {hits}{rate}",
            highlight=False,
            soft_wrap=True,
        )

    def _append(self, kind: str, step: int, epoch: int, facts: dict[str, Any]) -> None:
        record = {"kind": kind, "step": step, "epoch": epoch, "time": round(time.time(), 1), **facts}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _track(self, values: dict[str, float], step: int) -> None:
        if self._config.loop.tracker != "none":
            self._accelerator.log(values, step=step)


def keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Takes the other rows out of JSON Lines file `path`, and a last line that was cut off."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    path.write_text("".join(f"{line}\n" for line in lines if is_kept(json.loads(line))), encoding="utf-8")


def check_tracker(name: str) -> None:
    """Raises:
    ImportError: tracker `name` is not installed.
    """
    if name != "none" and find_spec(name) is None:
        raise ImportError(f"tracker {name} is not installed: pip install {name}, or choose the tracker none")


def _peak_memory_gb() -> float:
    """Of this process so far: on the GPU where there is one, else in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, int | float | str]:
    """`section.field` to a number or a text, which is all that every tracker takes."""
    found: dict[str, int | float | str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, int | float | str) else json.dumps(value)
    return found


def _tracker_options(config: RunConfig) -> dict[str, Any]:
    if config.loop.tracker != "wandb":
        return {}
    import wandb  # only where it is asked for: importing it takes seconds

    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
    return {"wandb": {"name": config.name, "mode": mode}}


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a request that all processes act on after one step; a second one interrupts.

    Without an accelerator, before there are steps to wait for, either raises KeyboardInterrupt where it comes.
    """

    def __init__(self, accelerator: Accelerator | None = None):
        self._accelerator = accelerator
        self._is_asked = False
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "StopRequest":
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        except ValueError:  # not in the main thread, where signals can't be caught
            self._before = {}
        return self

    def wait_for_steps(self, accelerator: Accelerator) -> None:
        """From here on a request waits until `is_requested` is asked."""
        self._accelerator = accelerator

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_requested(self) -> bool:
        """Whether any process was asked; a collective call."""
        assert self._accelerator is not None
        if self._accelerator.num_processes == 1:
            return self._is_asked
        asked = torch.tensor(int(self._is_asked), device=self._accelerator.device)
        return bool(self._accelerator.reduce(asked, "sum"))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked or self._accelerator is None:
            raise KeyboardInterrupt
        self._is_asked = True
