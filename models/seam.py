"""The seam to transformers: the functions its mixers call, replaced by tree operators while a tree is active.

Every mixer of transformers calls module-level functions, `causal_conv1d_fn` and a scan such as `mamba2_chunk_scan`, and
every attention layer looks its function up by name. Each is wrapped once. The wrapper calls the original unless a tree
forward is running in this context, so prefill, training and `generate` of the same model are untouched, and so is any
other thread.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftwood.kernels.tables import TreeTables
from draftwood.kernels.tree_attention import tree_attention
from draftwood.kernels.tree_conv import tree_conv
from draftwood.kernels.tree_delta import tree_delta
from draftwood.kernels.tree_scan import tree_scan
from draftwood.kernels.tree_selective import tree_selective
from draftwood.models.cache import DecodeCache

Operator = Callable[..., Any]


@dataclass(frozen=True)
class TreeForward:
    """What the replaced functions need to know of the tree forward they run in."""

    tables: TreeTables
    valid: Tensor | None  # [B, N] bool, None where no node is padding
    lengths: Tensor  # [B] int64, committed tokens
    cache: DecodeCache
    operators: Mapping[str, Operator]  # what runs in place of each transformers function


_active: ContextVar[TreeForward | None] = ContextVar("draftwood_tree_forward", default=None)


@contextmanager
def tree_forward(forward: TreeForward) -> Iterator[None]:
    """Within this context the installed functions run over `forward`'s tree and the cache takes nothing in."""
    token = _active.set(forward)
    forward.cache.set_tree_active(True)
    try:
        yield
    finally:
        forward.cache.set_tree_active(False)
        _active.reset(token)


def install(module: ModuleType, names: tuple[str, ...]) -> None:
    """Wraps the named functions of a transformers modeling module; doing it again changes nothing.

    Raises:
        RuntimeError: the module lacks one of them, so this transformers version cannot verify trees for the family.
    """
    for name in names:
        original = getattr(module, name, None)
        if original is None:
            raise RuntimeError(
                f"{module.__name__} has no function '{name}': this transformers version is not one draftwood can "
                "verify trees with; the versions that work are in pyproject.toml"
            )
        if not hasattr(original, "without_tree"):
            setattr(module, name, _wrap(original, name))


def install_attention() -> None:
    """Wraps transformers' SDPA attention, which all its models look up by name, in the same way."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(original, "without_tree"):
        ALL_ATTENTION_FUNCTIONS.register("sdpa", _wrap(original, "sdpa"))


def _wrap(original: Operator, name: str) -> Operator:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        # A compiled forward of the model is none over a tree, and a ContextVar cannot be traced.
        forward = None if torch.compiler.is_compiling() else _active.get()
        return original(*args, **kwargs) if forward is None else forward.operators[name](forward, *args, **kwargs)

    function.without_tree = original  # type: ignore[attr-defined]
    return function


def _conv(
    forward: TreeForward,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    window = forward.cache.current.window
    return tree_conv(
        hidden_states, window, weight, forward.tables, bias=bias, activation=activation, valid=forward.valid
    )


def _ssd_scan(
    forward: TreeForward,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[Tensor, Any]:
    # chunk_size means nothing to a tree; mixers pass z=None and apply their gate in the norm
    return tree_scan(
        hidden_states,
        dt,
        A,
        B,
        C,
        forward.tables,
        initial_state=forward.cache.current.state,
        D=D,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        valid=forward.valid,
    )


def _delta_rule(
    forward: TreeForward,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Any]:
    return tree_delta(
        query,
        key,
        value,
        g,
        beta,
        forward.tables,
        initial_state=forward.cache.current.state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        valid=forward.valid,
    )


def _selective_scan(
    forward: TreeForward,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Any]:
    return tree_selective(
        hidden_states,
        dt,
        A,
        B,
        C,
        forward.tables,
        initial_state=forward.cache.current.state,
        D=D,
        z=z,
        dt_bias=delta_bias,
        dt_softplus=delta_softplus,
        valid=forward.valid,
    )


def _attention(
    forward: TreeForward,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    # key and value [B, Hkv, L + N, Dh] are views of the cache's buffer; so are their two parts
    prefix = key.shape[2] - query.shape[2]
    out = tree_attention(
        query,
        key[:, :, :prefix],
        value[:, :, :prefix],
        key[:, :, prefix:],
        value[:, :, prefix:],
        forward.lengths,
        forward.tables,
        scale=scaling,
        valid=forward.valid,
    )
    return out.transpose(1, 2), None


OPERATORS: Mapping[str, Operator] = {
    "sdpa": _attention,
    "causal_conv1d_fn": _conv,
    "mamba2_chunk_scan": _ssd_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba_selective_scan": _selective_scan,
}
