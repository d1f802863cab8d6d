"""What only a GPU can show of the Triton kernels: that they are right there, then how long they take.

`scripts/gpu_check.py` runs this and prints it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels import cases
from draftwood.kernels.cases import Inputs, cast
from draftwood.kernels.dispatch import use
from draftwood.kernels.tables import TreeTables
from draftwood.kernels.tree_attention import tree_attention
from draftwood.kernels.tree_conv import tree_conv, tree_conv_commit
from draftwood.kernels.tree_delta import tree_delta
from draftwood.kernels.tree_scan import tree_scan
from draftwood.kernels.tree_selective import tree_selective

# Largest error over largest value. The float32 products of a kernel are not those of the float64 truth.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer; the defaults are those of an 8B hybrid (MambaInLlama)."""

    heads: int = 32
    width: int = 128
    states: int = 128
    groups: int = 8
    inner: int = 4096
    prefix: int = 4096


SMOKE = Shape(heads=2, width=8, states=8, groups=1, inner=16, prefix=70)


@dataclass(frozen=True)
class Check:
    operator: str
    nodes: int
    dtype: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Timing:
    """Microseconds: of the kernel in a CUDA graph, called from Python, of the torch version, of its bytes alone."""

    name: str
    nodes: int
    graph_us: float | None
    eager_us: float | None
    torch_us: float | None
    bytes_us: float | None
    note: str = ""


def _operators(shape: Shape, nodes: int, groups: int) -> dict[str, tuple[Callable[..., Any], Inputs]]:
    generator = torch.Generator().manual_seed(nodes)
    heads = shape.heads

    scan_sizes: Inputs = {"heads": heads, "width": shape.width, "groups": groups, "states": shape.states}
    delta_sizes: Inputs = {
        "heads": heads,
        "key_heads": max(1, heads // 2),
        "key_width": shape.states,
        "width": shape.width,
    }
    attention_sizes: Inputs = {
        "heads": heads,
        "kv_heads": shape.groups,
        "width": shape.width,
        "value_width": shape.width,
    }
    channel_delta = delta_sizes | {"per_channel": True, "key_heads": heads}
    return {
        "tree_scan": (tree_scan, cases.scan_inputs(generator, 1, nodes, **scan_sizes)),
        "tree_scan extreme": (tree_scan, cases.scan_inputs(generator, 1, nodes, **scan_sizes, extreme=True)),
        "tree_conv": (tree_conv, cases.conv_inputs(generator, 1, nodes, width=shape.inner, taps=4, window=4)),
        "tree_delta": (tree_delta, cases.delta_inputs(generator, 1, nodes, **delta_sizes)),
        "tree_delta per channel": (tree_delta, cases.delta_inputs(generator, 1, nodes, **channel_delta)),
        "tree_selective": (
            tree_selective,
            cases.selective_inputs(generator, 1, nodes, width=shape.inner, states=16),
        ),
        "tree_attention": (
            tree_attention,
            cases.attention_inputs(generator, 1, nodes, **attention_sizes, lengths=[shape.prefix]),
        ),
    }


def _results(operator: Callable[..., Any], inputs: Inputs, tables: TreeTables, node: int) -> dict[str, Tensor]:
    """The outputs, and the committed state after `node`."""
    result = operator(tables=tables, **inputs)
    nodes = torch.full((1,), node, device=tables.parents.device)
    if isinstance(result, tuple):
        return {"outputs": result[0], "state": result[1].advance(inputs["initial_state"], tables, nodes)}
    if operator is tree_conv:
        return {"outputs": result, "window": tree_conv_commit(inputs["window"], inputs["x"], tables, nodes)}
    return {"outputs": result}


def checks(device: torch.device, shape: Shape, sizes: tuple[int, ...]) -> Iterator[Check]:
    """Every Triton kernel against the torch version in float64 on the same device."""
    for nodes in sizes:
        tables = cases.random_tables(torch.Generator().manual_seed(nodes), 1, nodes, 6)
        tables = TreeTables.from_parents(tables.parents.to(device))
        for name, (operator, inputs) in _operators(shape, nodes, shape.groups).items():
            for dtype, allowed in ALLOWED.items():
                rounded = cast(inputs, dtype, device)
                with use("torch"):
                    expected = _results(operator, cast(rounded, torch.float64, device), tables, nodes - 1)
                with use("triton"):
                    actual = _results(operator, rounded, tables, nodes - 1)
                for part, value in actual.items():
                    difference = (value.double() - expected[part]).abs().max()
                    error = (difference / expected[part].abs().max().clamp(min=1.0)).item()
                    # NaN compares false with everything: it is the largest error.
                    error = error if error == error else float("inf")
                    yield Check(f"{name} {part}", nodes, str(dtype).removeprefix("torch."), error, allowed)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per microsecond, read plus written, of a large copy."""
    size = 1 << 30 if device.type == "cuda" else 1 << 22
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / eager_us(lambda: target.copy_(source))


def eager_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call from Python; on a GPU the median of many."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return 1e3 * float(do_bench(call, warmup=10, rep=50, return_mode="median"))
    call()
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def _graph_us(call: Callable[[], Any]) -> float | None:
    if not torch.cuda.is_available():
        return None
    from triton.testing import do_bench_cudagraph

    return 1e3 * float(do_bench_cudagraph(call, rep=50, return_mode="median"))


def _timing(name: str, nodes: int, call: Callable[[], Any], moved: int | None, bandwidth: float) -> Timing:
    floor = None if moved is None else moved / bandwidth
    try:
        with use("triton"):
            call()
            graph, eager = _graph_us(call), eager_us(call)
        with use("torch"):
            plain = eager_us(call)
    except RuntimeError as error:
        # One kernel that can't be timed must not cost the other figures of a rented machine.
        return Timing(name, nodes, None, None, None, floor, f"{type(error).__name__}: {str(error)[:200]}")
    return Timing(name, nodes, graph, eager, plain, floor)


def _scan_bytes(inputs: Inputs) -> int:
    """What one scan has to move: its inputs once, y once."""
    tensors = [inputs[name] for name in ("x", "x", "dt", "B", "C", "initial_state")]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def timings(device: torch.device, shape: Shape, sizes: tuple[int, ...], deadline: float) -> Iterator[Timing]:
    """Times at one layer's sizes with bfloat16 activations and a float32 state; stops at `deadline` (monotonic)."""
    bandwidth = copy_bandwidth(device)
    yield Timing("copy (bytes per us)", 0, None, bandwidth, None, None)
    for nodes in sizes:
        tables = TreeTables.from_parents(
            cases.random_parents(torch.Generator().manual_seed(nodes), 1, nodes, 6).to(device)
        )
        last = torch.full((1,), nodes - 1, device=device)
        for groups in sorted({shape.groups, shape.heads}):
            inputs = _bfloat16(_operators(shape, nodes, groups)["tree_scan"][1] | {"z": None}, device)
            call = _call(tree_scan, inputs, tables)
            yield _timing(f"tree_scan, {groups} groups", nodes, call, _scan_bytes(inputs), bandwidth)
            with use("triton"):
                replay = call()[1]
            state = inputs["initial_state"]
            moved = 2 * state.numel() * state.element_size()
            advance = _advance(replay, state, tables, last)
            yield _timing(f"tree_scan advance, {groups} groups", nodes, advance, moved, bandwidth)
            if time.monotonic() > deadline:
                return
        yield _mamba_ssm(inputs, nodes)
        for name, (operator, plain) in _operators(shape, nodes, shape.groups).items():
            if time.monotonic() > deadline:
                return
            if "tree_scan" not in name:
                yield _timing(name, nodes, _call(operator, _bfloat16(plain, device), tables), None, bandwidth)


def _bfloat16(inputs: Inputs, device: torch.device) -> Inputs:
    """Activations in bfloat16, state and parameters in float32, as the models hold them."""
    kept = ("A", "D", "dt_bias", "initial_state", "g")
    activations = {name: value for name, value in inputs.items() if name not in kept}
    parameters = {name: value for name, value in inputs.items() if name in kept}
    return cast(activations, torch.bfloat16, device) | cast(parameters, torch.float32, device)


def _call(operator: Callable[..., Any], inputs: Inputs, tables: TreeTables) -> Callable[[], Any]:
    return lambda: operator(tables=tables, **inputs)


def _advance(replay: Any, state: Tensor, tables: TreeTables, nodes: Tensor) -> Callable[[], Any]:
    return lambda: replay.advance(state, tables, nodes)


def _mamba_ssm(inputs: Inputs, nodes: int) -> Timing:
    """The chain scan of mamba-ssm on the same inputs: what a tree is compared with, where the package imports."""
    name = "mamba_ssm chain scan"
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as error:  # its released wheel raises more than ImportError without its compiled part
        return Timing(name, nodes, None, None, None, None, f"does not import: {str(error)[:100]}")
    arguments: Inputs = {key: inputs[key] for key in ("x", "dt", "A", "B", "C")}
    shared: dict[str, Any] = {"D": inputs["D"], "dt_bias": inputs["dt_bias"], "dt_softplus": True}

    def call() -> Any:
        return mamba_chunk_scan_combined(
            *arguments.values(),
            chunk_size=64,
            initial_states=inputs["initial_state"],
            return_final_states=True,
            **shared,
        )

    device = inputs["x"].device
    chain = TreeTables.from_parents(torch.arange(-1, nodes - 1, device=device)[None], nodes - 1)
    try:
        theirs, their_state = call()
        with use("triton"):
            ours, replay = tree_scan(**arguments, tables=chain, initial_state=inputs["initial_state"], **shared)
        our_state = replay.advance(inputs["initial_state"], chain, torch.full((len(ours),), nodes - 1, device=device))
        pairs = ((ours, theirs), (our_state, their_state))
        errors = [((a - b).float().abs().max() / b.float().abs().max()).item() for a, b in pairs]
        note = f"our scan of a chain differs by {errors[0]:.1e} in the outputs, {errors[1]:.1e} in the state"
        return Timing(name, nodes, _graph_us(call), eager_us(call), None, None, note)
    except RuntimeError as error:
        return Timing(name, nodes, None, None, None, None, f"{type(error).__name__}: {str(error)[:200]}")
