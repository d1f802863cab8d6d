"""Ways of decoding run side by side on the same prompts, taking turns, and kept prompt by prompt in a journal."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from torch import Tensor

from draftwood.decode.generate import GenerateOutput
from draftwood.decode.prompts import Prompt
from draftwood.decode.stats import ForwardStats, RowStats

# way(input_ids [1, T], seed, **changed settings) -> new tokens with their acceptance, or the tokens alone
Way = Callable[..., GenerateOutput | list[int]]
WARMUP_TOKENS = 4


@dataclass(frozen=True)
class Outcome:
    """What one way did on one prompt: new tokens, median seconds, and acceptance where it counted any.

    `timings` are those of the last repeat, as `GenerateOutput` has them.
    """

    tokens: list[int]
    seconds: float
    stats: RowStats
    timings: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        forwards = [list(f) for f in self.stats.forwards]
        return {"tokens": self.tokens, "seconds": self.seconds, "forwards": forwards, "timings": self.timings}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Outcome":
        stats = RowStats([ForwardStats(*f) for f in values["forwards"]])
        return cls(values["tokens"], values["seconds"], stats, values.get("timings", {}))


class Journal:
    """JSON Lines: what is measured, then a line for each prompt done. `None` for a path keeps nothing.

    Raises:
        ValueError: a line that is not of a journal.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any]):
        self.path, self.identity = path, json.loads(json.dumps(identity, default=str))
        self.done: dict[int, dict[str, Outcome]] = {}
        if path is not None and path.exists():
            self._read(path)
        if path is not None and not self.done:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.identity) + "\n", encoding="utf-8")

    def _read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a last line without its end was being written when the run was stopped
        first, *lines = whole.splitlines() or ["{}"]
        try:
            if json.loads(first) != self.identity:
                return  # of another measurement: this one starts over
            entries = [json.loads(line) for line in lines]
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not a journal of an evaluation ({error}); delete it to measure anew") from None
        self.done = {e["prompt"]: {way: Outcome.from_dict(o) for way, o in e["outcomes"].items()} for e in entries}
        path.write_text(whole, encoding="utf-8")

    def add(self, number: int, outcomes: dict[str, Outcome]) -> None:
        self.done[number] = outcomes
        if self.path is not None:
            entry = {"prompt": number, "outcomes": {way: outcome.to_dict() for way, outcome in outcomes.items()}}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def measure(
    ways: Mapping[str, Way],
    prompts: list[Prompt],
    journal: Journal,
    *,
    device: Any,
    seed: int,
    repeats: int = 1,
    on_prompt: Callable[[int, int], None] | None = None,
) -> list[dict[str, Outcome]]:
    """Every way on every prompt, `repeats` times; prompts that the journal has are not run again.

    The order rotates from prompt to prompt, so that a machine that slows down slows all. Prompt i uses seed + i.
    """
    if len(journal.done) < len(prompts):
        for way in ways.values():
            way(prompts[0].input_ids.to(device), seed, max_new_tokens=WARMUP_TOKENS)
    for number, prompt in enumerate(prompts):
        if number not in journal.done:
            journal.add(number, _outcomes(ways, prompt.input_ids.to(device), number, seed + number, repeats))
        if on_prompt is not None:
            on_prompt(number + 1, len(prompts))
    return [journal.done[number] for number in range(len(prompts))]


def _outcomes(ways: Mapping[str, Way], ids: Tensor, number: int, seed: int, repeats: int) -> dict[str, Outcome]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    outputs: dict[str, GenerateOutput | list[int]] = {}
    names = list(ways)
    for repeat in range(repeats):
        by = (number + repeat) % len(names)
        for way in names[by:] + names[:by]:
            started = perf_counter()
            outputs[way] = ways[way](ids, seed)
            times[way].append(perf_counter() - started)
    outcomes = {}
    for way, out in outputs.items():
        if isinstance(out, list):
            outcomes[way] = Outcome(out, median(times[way]), RowStats())
        else:
            outcomes[way] = Outcome(out.tokens[0], median(times[way]), out.rows[0], out.timings)
    return outcomes
