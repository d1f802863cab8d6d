"""The certificate of a draft: what was checked, what came out, and of which weights, on what machine and when."""

import json
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

FORMAT = 1


@dataclass(frozen=True)
class Evidence:
    """One check: its name, whether it passed, the measure or reason in words, and the figures behind it."""

    name: str
    passed: bool
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Certificate:
    """Attributes:
    subject: target, draft and their hashes, dtype, device.
    settings: what was run.
    evidence: the checks, in the order they ran.
    """

    subject: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    date: str
    evidence: list[Evidence] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.evidence) and all(evidence.passed for evidence in self.evidence)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "passed": self.passed, **asdict(self)}

    def table(self) -> Table:
        verdict = "lossless by all that was checked" if self.passed else "NOT LOSSLESS"
        subject = self.subject
        table = Table(title=f"{subject['draft']} on {subject['target']}: {verdict}", show_header=False)
        for evidence in self.evidence:
            mark = "[green]pass[/green]" if evidence.passed else "[bold red]FAIL[/bold red]"
            table.add_row(evidence.name, f"{mark}  {evidence.detail}")
        table.caption = f"{subject['dtype']}, {subject['device']}, {self.date}"
        return table

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return path


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    digest = sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
