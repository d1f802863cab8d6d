"""What a target is and whether it can be relied on, in seconds and before any GPU hour: `draftwood doctor MODEL`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from draftwood.models import gates
from draftwood.models.families import layer_types
from draftwood.models.target import Target
from draftwood.models.tree import Tree


@dataclass(frozen=True)
class Finding:
    """One check: its name, whether it passed, and the measure or the plain reason."""

    name: str
    passed: bool
    detail: str


@dataclass
class Diagnosis:
    """Attributes:
    facts: what the target is, name to value.
    findings: the checks, in the order they ran.
    """

    facts: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def table(self) -> Table:
        table = Table(title=f"{self.facts['target']}: {'sound' if self.is_healthy else 'NOT SOUND'}", show_header=False)
        for name, value in self.facts.items():
            text = f"{value:,}" if isinstance(value, int) else str(value)
            table.add_row(name.replace("_", " "), text)
        table.add_section()
        for finding in self.findings:
            mark = "[green]pass[/green]" if finding.passed else "[bold red]FAIL[/bold red]"
            table.add_row(finding.name, f"{mark}  {finding.detail}")
        return table

    def to_dict(self) -> dict[str, Any]:
        return {"healthy": self.is_healthy, "facts": self.facts, "findings": [asdict(f) for f in self.findings]}


# Two branches under the root, each two deep: the smallest tree that a flattened scan gets wrong.
_TREE = Tree.from_parents([-1, 0, 0, 1, 2])


def diagnose(target: Target) -> Diagnosis:
    """Facts and checks of a target made without its gates, so that a sick one can be looked at too."""
    ids = gates.probe_ids(target, 12)
    state = target.prefill(ids[:, :7])
    target.verify(state, ids[:, 7:], _TREE)
    fixed, per_token = state.cache.state_bytes()
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    diagnosis = Diagnosis(
        {
            "target": target.name,
            "family": target.config.model_type,
            "layers": dict(Counter(layer_types(target.config))),
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "weights_bytes": weights,
            "state_bytes_per_row": fixed,
            "kv_bytes_per_token": per_token,
            "kept_bytes_per_node": state.cache.kept_bytes(_TREE.num_nodes) // _TREE.num_nodes,
            "state_per_node_bytes": fixed + per_token,
        }
    )
    checks: list[tuple[str, Callable[[Target], float]]] = [
        ("head reproduces the logits from the features", gates.check_head),
        ("cached forward of several tokens equals one without cache", gates.check_cached_forward),
        ("padded batch equals its single rows", _check_padded_batch),
        ("every node of a tree equals its own path", _check_tree),
        ("state after commit equals a fresh prefill", _check_commit),
    ]
    for name, check in checks:
        try:
            diagnosis.findings.append(Finding(name, True, f"relative error {check(target):.1e}"))
        except (ValueError, RuntimeError) as error:
            diagnosis.findings.append(Finding(name, False, str(error)))
    return diagnosis


def _bounded(target: Target, got: Tensor, want: Tensor, what: str) -> float:
    error = gates.relative_error(got, want)
    if not error <= gates.tolerance(target):
        raise ValueError(f"{what}: differs by {error:.1e} of the largest value, limit {gates.tolerance(target):.0e}")
    return error


@torch.no_grad()
def _check_padded_batch(target: Target) -> float:
    ids = gates.probe_ids(target, 9)
    batch = torch.cat([ids, torch.cat([ids[:, 4:], ids[:, :4] * 0], 1)])
    mask = torch.ones_like(batch)
    mask[1, 5:] = 0
    got = target.features(batch, mask)
    return _bounded(target, got[1:, :5], target.features(ids[:, 4:]), "a row with padding")


@torch.no_grad()
def _check_tree(target: Target) -> float:
    ids = gates.probe_ids(target, 12)
    state = target.prefill(ids[:, :7])
    got = target.verify(state, ids[:, 7:], _TREE).features
    rows = [torch.cat([ids[:, :7], ids[:, 7:][:, _TREE.path(node)]], 1) for node in range(_TREE.num_nodes)]
    want = torch.stack([target.features(row)[:, -1] for row in rows], 1)
    return _bounded(target, got, want, "tree features against plain forwards")


@torch.no_grad()
def _check_commit(target: Target) -> float:
    ids = gates.probe_ids(target, 12)
    state = target.prefill(ids[:, :7])
    target.verify(state, ids[:, 7:], _TREE)
    target.commit(state, [_TREE.path(4)])
    fresh = target.prefill(torch.cat([ids[:, :7], ids[:, 7:][:, _TREE.path(4)]], 1))
    worst = 0.0
    for got, want in zip(state.cache.recurrent_layers, fresh.cache.recurrent_layers, strict=True):
        worst = max(worst, _bounded(target, got.window, want.window, "conv window"))
        if want.recurrent_states[0] is not None:
            worst = max(worst, _bounded(target, got.state, want.state, "recurrent state"))
    step = ids[:, 0]
    after = target.step(state, step).logits
    return max(worst, _bounded(target, after, target.step(fresh, step).logits, "logits of the next step"))
