"""A plan: the tree that `draftwood plan` found best for a draft on one machine, and what it costs and brings."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwood.decode.propose.dynamic import DynamicTree
from draftwood.decode.propose.joined import JoinedTree
from draftwood.decode.propose.lookup import Lookup
from draftwood.models.checkpoint import draft_folder, notes_folder, weights_sha256
from draftwood.models.tree import Tree

FORMAT = 1
FILE = "plan.json"


@dataclass(frozen=True)
class Plan:
    """For one dtype; a `tree` that `generate` takes.

    Attributes:
        tree: static or dynamic, or one of them joined by lookup.
        tokens_per_step: predicted, the bonus token included.
        step_ms: of a speculative step, draft and commit included.
        autoregressive_ms: of a step without drafts.
        interval: 95 % of the predicted speed-up, by bootstrap over prompts, each with a tree that others chose.
        details: what else was measured.
    """

    tree: Tree | DynamicTree | JoinedTree
    tokens_per_step: float
    step_ms: float
    autoregressive_ms: float
    interval: tuple[float, float]
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a figure that is not a number above 0.
        """
        for name in ("tokens_per_step", "step_ms", "autoregressive_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number above 0")
        if self.level_ms is not None and not 0 <= self.level_ms < math.inf:
            raise ValueError(f"a level costs {self.level_ms} ms; expected 0 or more")

    @property
    def speedup(self) -> float:
        """Over decoding without drafts in the same dtype."""
        return self.tokens_per_step * self.autoregressive_ms / self.step_ms

    @property
    def is_worthwhile(self) -> bool:
        return self.speedup > 1

    @property
    def level_ms(self) -> float | None:
        """Of drafting one more level of a dynamic tree, where that was measured."""
        dynamic = self.details.get("costs_ms", {}).get("dynamic")
        return dynamic[1] if dynamic else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "speculate": self.is_worthwhile,
            "tree": _tree_to_dict(self.tree),
            "tokens_per_step": self.tokens_per_step,
            "step_ms": self.step_ms,
            "autoregressive_ms": self.autoregressive_ms,
            "speedup": self.speedup,
            "speedup_interval": list(self.interval),
            **self.details,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        known = ("tree", "speculate", "tokens_per_step", "step_ms", "autoregressive_ms", "speedup", "speedup_interval")
        return cls(
            _tree_from_dict(values["tree"]),
            values["tokens_per_step"],
            values["step_ms"],
            values["autoregressive_ms"],
            tuple(values["speedup_interval"]),
            {key: value for key, value in values.items() if key not in known},
        )


def _tree_to_dict(tree: Any) -> dict[str, Any]:
    if isinstance(tree, JoinedTree):
        return {**_tree_to_dict(tree.tree), "lookup": vars(tree.lookup)}
    return {"parents": tree.rows[0]} if isinstance(tree, Tree) else {"dynamic": vars(tree)}


def _tree_from_dict(values: dict[str, Any]) -> Tree | DynamicTree | JoinedTree:
    tree = Tree.from_parents(values["parents"]) if "parents" in values else DynamicTree(**values["dynamic"])
    return JoinedTree(tree, Lookup(**values["lookup"])) if "lookup" in values else tree


def load_plan(path: str | Path, dtype: str) -> Plan:
    """The plan for `dtype` in a file, or of a draft by its folder or name.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a plan, or none for this dtype.
    """
    path, version, plans = _read(path)
    if dtype not in plans:
        raise ValueError(
            f"{path}: a plan of format {version} for {', '.join(plans) or 'no dtype'}; expected format "
            f"{FORMAT} and {dtype}, as the target: run `draftwood plan` with --dtype {dtype}"
        )
    return _plan(path, plans[dtype])


def check_weights(path: str | Path, draft: str | Path) -> None:
    """That a plan was made for the draft's weights as they are now.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a plan, one of other weights, or one that does not say of which.
    """
    path, values = _values(path)
    try:
        made_for = values.get("settings", {}).get("draft_sha256")
    except AttributeError as error:
        raise _not_a_plan(path, error) from None
    if made_for != weights_sha256(draft):
        raise ValueError(f"{path}: a plan for other weights than those of {draft}; make it anew with `draftwood plan`")


def plans_of(draft: str | Path, dtypes: Sequence[str]) -> dict[str, Plan]:
    """The plans of a draft, by its folder or name, for those of `dtypes` that there are plans for.

    Raises:
        ValueError: the draft's file is not a plan, or one of other weights.
    """
    path = plan_file(draft)
    if not path.is_file():
        return {}
    check_weights(path, draft)
    plans = _read(path)[2]
    return {dtype: _plan(path, plans[dtype]) for dtype in dtypes if dtype in plans}


def plan_file(draft: str | Path) -> Path:
    """Where the plan of a draft is, or will be: the one made on this machine before one that came with the draft."""
    made, brought = notes_folder(draft) / FILE, draft_folder(draft) / FILE
    return brought if brought.is_file() and not made.is_file() else made


def find_plan(path: str | Path) -> Path:
    """The plan's file: `path` itself, or that of a draft by its folder or name.

    Raises:
        FileNotFoundError: no such file.
    """
    path = Path(path) if Path(path).suffix == ".json" and not Path(path).is_dir() else plan_file(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no plan; `draftwood plan TARGET DRAFT` makes one")
    return path


def _read(path: str | Path) -> tuple[Path, Any, dict[str, Any]]:
    """The file, its format and, where that is known, the plans in it by dtype."""
    path, values = _values(path)
    try:
        return path, values["format"], dict(values["plans"]) if values["format"] == FORMAT else {}
    except (KeyError, TypeError, ValueError) as error:
        raise _not_a_plan(path, error) from None


def _values(path: str | Path) -> tuple[Path, Any]:
    """The file, and what it holds."""
    path = find_plan(path)
    try:
        return path, json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _not_a_plan(path, error) from None


def _plan(path: Path, values: Any) -> Plan:
    try:
        return Plan.from_dict(values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _not_a_plan(path, error) from None


def _not_a_plan(path: Path, error: Exception) -> ValueError:
    reason = f"no {error}" if isinstance(error, KeyError) else error
    return ValueError(f"{path}: not a plan ({reason}); make it anew with `draftwood plan`")
