"""What the benchmarks on random models have in common: the record that they write, the model, the machine."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftwood.models.target import Target

Row = TypeVar("Row")


@dataclass(frozen=True)
class BenchmarkRecord(Generic[Row]):
    """What was run, and a row for each thing measured."""

    settings: dict[str, Any]
    rows: list[Row]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def random_model(model_type: str, dtype: torch.dtype, device: torch.device, seed: int, **sizes: Any) -> Target:
    """A transformers model of this type and these sizes with random weights, its head tied to its embeddings."""
    config = AutoConfig.for_model(model_type, tie_word_embeddings=True, attn_implementation="sdpa", **sizes)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target(model, name="random")


def machine(device: torch.device) -> dict[str, Any]:
    """What of the machine a record states."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
