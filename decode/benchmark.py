"""What one decode step costs: tree verification with replay against an autoregressive step and the ways others do it.

All ways advance the same random model by the same accepted path (verify and commit, or their equivalents), take turns
within one run, and are reported as medians. `state_per_node` keeps one recurrent state for each node and picks one at
commit; `unrolled` gives each root-to-leaf path a row of the batch, each with its own copy of the committed state.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from draftwood.decode.benchmark_record import BenchmarkRecord, machine, random_model
from draftwood.decode.tree import Tree
from draftwood.kernels.decay import discretize
from draftwood.models import seam
from draftwood.models.cache import merge_rows, select_row
from draftwood.models.graph import GraphStep
from draftwood.models.memory import peak_memory
from draftwood.models.state import DecodeState
from draftwood.models.target import Target
from draftwood.models.timing import elapsed_ms

METHODS = ("autoregressive", "chain", "tree", "state_per_node", "unrolled")


@dataclass(frozen=True)
class Shape:
    """A random Bamba-style hybrid: every second layer attention, the others Mamba-2."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    mamba_heads: int
    mamba_head_dim: int
    state_size: int
    groups: int
    vocab_size: int = 49152


# Layer shapes of SmolLM2-135M with half its layers Mamba-2, and a few layers of two 8B hybrids.
SHAPES = {
    "smollm2": Shape(576, 30, 1536, 9, 3, 9, 64, 64, 3),
    "mambainllama-8b": Shape(4096, 4, 14336, 32, 8, 32, 128, 128, 32, vocab_size=128256),
    "nemotron-h-8b": Shape(4096, 4, 21504, 32, 8, 128, 64, 128, 8, vocab_size=131072),
    "tiny": Shape(64, 2, 96, 4, 2, 4, 16, 16, 2, vocab_size=97),
}


@dataclass(frozen=True)
class Row:
    """One way at one tree size: median time of a step, its ratio to the autoregressive step of the same dtype, the peak
    of tensor bytes above the resting state, and what is kept between verify and commit."""

    method: str
    dtype: str
    nodes: int
    ms: float
    ratio_to_autoregressive: float
    peak_mib: float
    kept_bytes: int


@dataclass(frozen=True)
class VerifyBenchmark(BenchmarkRecord[Row]):
    def table(self) -> Table:
        table = Table("method", "dtype", "nodes", "ms", "ratio", "peak MiB", "kept KiB")
        for row in self.rows:
            kept = f"{row.kept_bytes / 1024:,.0f}"
            ratio = f"{row.ratio_to_autoregressive:.2f}"
            table.add_row(row.method, row.dtype, str(row.nodes), f"{row.ms:.2f}", ratio, f"{row.peak_mib:,.1f}", kept)
        return table

    def plot(self, path: Path) -> None:
        """Time of a step over the number of nodes, a panel for each dtype."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        dtypes = list(dict.fromkeys(row.dtype for row in self.rows))
        figure, axes = pyplot.subplots(1, len(dtypes), figsize=(6 * len(dtypes), 4), squeeze=False, sharey=True)
        for axis, dtype in zip(axes[0], dtypes, strict=True):
            for method in METHODS:
                mine = [row for row in self.rows if row.method == method and row.dtype == dtype]
                if method == "autoregressive":
                    axis.axhline(mine[0].ms, linestyle="--", color="black", label=method)
                elif mine:
                    axis.plot([row.nodes for row in mine], [row.ms for row in mine], marker="o", label=method)
            axis.set(title=dtype, xlabel="nodes", ylabel="ms per step", xscale="log", yscale="log")
            axis.legend()
        figure.tight_layout()
        figure.savefig(path)
        pyplot.close(figure)


def random_target(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Target:
    """A Bamba model of these shapes with random weights."""
    return random_model(
        "bamba",
        dtype,
        device,
        seed,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        attn_layer_indices=list(range(1, shape.num_layers, 2)),
        mamba_n_heads=shape.mamba_heads,
        mamba_d_head=shape.mamba_head_dim,
        mamba_d_state=shape.state_size,
        mamba_n_groups=shape.groups,
        mamba_expand=shape.mamba_heads * shape.mamba_head_dim // shape.hidden_size,
        vocab_size=shape.vocab_size,
    )


def bushy_tree(num_nodes: int) -> Tree:
    """A root with three children, whose subtrees go on with three, two and one child a node, in breadth."""
    parents, open_nodes = [-1], [(0, 3)]
    while len(parents) < num_nodes:
        node, width = open_nodes.pop(0)
        for i in range(width):
            if len(parents) < num_nodes:
                parents.append(node)
                open_nodes.append((len(parents) - 1, max(1, width - i)))
    return Tree.from_parents(parents)


def benchmark_verify(
    shape: Shape,
    *,
    nodes: tuple[int, ...] = (1, 5, 13, 32, 64),
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    context: int = 256,
    repeats: int = 15,
    device: torch.device | str = "cpu",
    graph: bool = False,
    methods: tuple[str, ...] = METHODS,
    on_progress: Callable[[str], None] = lambda _: None,
) -> VerifyBenchmark:
    """Times every method at every size.

    Args:
        context: tokens in the state before the step.
        repeats: timed rounds; in each, every method and size runs once.
        graph: chain and tree through `GraphStep`, captured where there is a GPU.

    Raises:
        ValueError: a number below 1.
    """
    for setting, value in (("nodes", min(nodes, default=0)), ("context", context), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{setting} is {value}; expected 1 or more")
    device, rows = torch.device(device), []
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        on_progress(f"{name}: building the model")
        target = random_target(shape, dtype, device)
        prompt = torch.randint(3, shape.vocab_size, (1, context), generator=torch.Generator().manual_seed(1))
        steps = {
            (method, n): _step(target, prompt, method, n, graph)
            for method in methods
            for n in (nodes if method != "autoregressive" else (1,))
        }
        times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
        for step in steps.values():
            step.run()
            step.run()
        for round_ in range(repeats):
            on_progress(f"{name}: round {round_ + 1} of {repeats}")
            for key, step in steps.items():
                times[key].append(elapsed_ms(device, step.run))
        base = median(times["autoregressive", 1])
        for (method, n), step in steps.items():
            with peak_memory(device) as peak:
                step.run()
            ms = median(times[method, n])
            rows.append(Row(method, name, n, ms, ms / base, peak[0] / 2**20, step.kept_bytes()))
    return VerifyBenchmark(
        {
            "shape": asdict(shape),
            "context": context,
            "repeats": repeats,
            "graph": graph,
            **machine(device),
        },
        rows,
    )


def step_benchmarks(
    device: torch.device, is_smoke: bool, deadline: float
) -> Iterator[tuple[str, bool, VerifyBenchmark]]:
    """Whole decode steps at 8B layer shapes in bfloat16, eager and captured, until `deadline` of the monotonic clock.

    A smoke run takes the tiny shape in float32.

    Yields:
        The shape's name, whether verify and commit were captured, and the figures.
    """
    methods = ("autoregressive", "chain", "tree")
    for name in ("tiny",) if is_smoke else ("mambainllama-8b", "nemotron-h-8b"):
        for graph in (False, True):
            if monotonic() < deadline:
                dtype = torch.float32 if is_smoke else torch.bfloat16
                options: dict[str, Any] = dict(nodes=(13, 64), dtypes=(dtype,), context=64 if is_smoke else 1024)
                repeats = 1 if is_smoke else 20
                yield (
                    name,
                    graph,
                    benchmark_verify(
                        SHAPES[name], **options, repeats=repeats, device=device, graph=graph, methods=methods
                    ),
                )


@dataclass(frozen=True)
class _Step:
    run: Callable[[], object]
    kept_bytes: Callable[[], int]


def _step(target: Target, prompt: Tensor, method: str, nodes: int, graph: bool) -> _Step:
    """One step of `method`, to be run again and again; each run advances its own state by two tokens at most."""
    state = target.prefill(prompt)
    tree = bushy_tree(nodes) if method in ("tree", "state_per_node", "unrolled") else Tree.chain(nodes - 1)
    tokens = torch.randint(3, 90, (1, nodes), generator=torch.Generator().manual_seed(nodes)).to(target.device)
    path = tree.path(tree.children()[0][-1]) if nodes > 1 else [0]
    if method == "autoregressive":
        return _Step(lambda: target.step(state, tokens[:, 0]), lambda: 0)
    if method == "unrolled":
        return _unrolled_step(target, state, tree, tokens, path)
    if graph and method != "state_per_node":
        fixed = GraphStep(target, state, capacity=4096, max_nodes=nodes, max_depth=tree.max_depth)

        def run_fixed() -> None:
            fixed.verify(tokens, tree)
            fixed.commit([path])

        return _Step(run_fixed, lambda: state.cache.kept_bytes(nodes))
    operators = _STATE_PER_NODE if method == "state_per_node" else seam.OPERATORS

    def run() -> None:
        target.operators = operators
        target.verify(state, tokens, tree)
        target.commit(state, [path])
        target.operators = seam.OPERATORS

    return _Step(run, lambda: state.cache.kept_bytes(nodes))


def _unrolled_step(target: Target, state: DecodeState, tree: Tree, tokens: Tensor, path: list[int]) -> _Step:
    leaves = [node for node, below in enumerate(tree.children()) if not below]
    paths = [tree.path(leaf) for leaf in leaves]
    chains = Tree.from_parents([list(range(-1, len(p) - 1)) for p in paths])
    ids = torch.zeros(len(paths), chains.num_nodes, dtype=torch.int64, device=target.device)
    for row, p in enumerate(paths):
        ids[row, : len(p)] = tokens[0, p]
    winner = next(row for row, p in enumerate(paths) if p[: len(path)] == path)
    current = {"state": state}

    def run() -> None:
        one = current["state"]
        cache = merge_rows([([row], one.cache) for row in range(len(paths))], target.config)
        rows = replace(one, cache=cache, lengths=one.lengths * len(paths))
        target.verify(rows, ids, chains)
        target.commit(rows, [list(range(len(path))) if row == winner else [] for row in range(len(paths))])
        current["rows"] = rows
        current["state"] = _row_of(target, rows, winner)

    return _Step(run, lambda: sum(current["rows"].cache.state_bytes()[:1]) * len(paths))


def _row_of(target: Target, state: DecodeState, row: int) -> DecodeState:
    cache = select_row(state.cache, row, target.config)
    return replace(state, cache=cache, lengths=[state.lengths[row]], pending=None)


@dataclass(frozen=True)
class _NodeStates:
    """One state for each node, [B, N, H, P, S]: what replay avoids."""

    states: Tensor

    def to(self, *_: Any) -> "_NodeStates":
        return self

    def advance(self, state: Tensor, tables: Any, nodes: Tensor) -> Tensor:
        picked = self.states[torch.arange(len(nodes), device=nodes.device), nodes.clamp(min=0)]
        return torch.where((nodes >= 0)[:, None, None, None], picked, state)


def _scan_keeping_states(
    forward: seam.TreeForward,
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
) -> tuple[Tensor, _NodeStates]:
    """Level by level, each node from its parent's state, all of them kept."""
    tables, first = forward.tables, forward.cache.current.state
    step = discretize(dt, dt_bias, dt_softplus, dt_limit)
    x = hidden_states.float()
    repeat = x.shape[2] // B.shape[2]
    b, c = (t.float().repeat_interleave(repeat, 2) for t in (B, C))
    decay = torch.exp(step * A.float())
    write = (step[..., None] * x)[..., None] * b[:, :, :, None]
    states = torch.empty(*x.shape, B.shape[-1], dtype=torch.float32, device=x.device)
    depth, parents = tables.depth[0].tolist(), tables.parents[0].tolist()
    for level in range(tables.max_depth + 1):
        here = [node for node, d in enumerate(depth) if d == level]
        above = first[:, None].float() if level == 0 else states[:, [parents[node] for node in here]]
        states[:, here] = decay[:, here, :, None, None] * above + write[:, here]
    y = torch.einsum("bnhps,bnhs->bnhp", states, c)
    if D is not None:
        y = y + D[:, None] * x
    return y.to(hidden_states.dtype), _NodeStates(states)


_STATE_PER_NODE: Mapping[str, Any] = {**seam.OPERATORS, "mamba2_chunk_scan": _scan_keeping_states}
