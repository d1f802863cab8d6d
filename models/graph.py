"""A decode step of fixed shapes: verify and commit captured once as CUDA graphs and replayed for every tree.

At batch 1 a tree step of a hybrid model is hundreds of small launches, and issuing them costs more than the bytes they
move. The captured step takes any tree of up to `max_nodes` nodes and `max_depth` levels; smaller ones are padded. Where
there is no GPU the same code runs eagerly on the same static tensors.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftwood.kernels.tables import TreeTables
from draftwood.models.state import DecodeState, accepted_columns, check_paths
from draftwood.models.target import Target, VerifyOutput
from draftwood.models.tree import Tree


class GraphStep:
    """`verify` and `commit` of one state, with static inputs and outputs.

    Args:
        state: of a prefill; its shapes become fixed.
        capacity: tokens the state can grow to.
        max_nodes: of a tree, the root included.
        max_depth: levels of a tree below its root.

    Raises:
        ValueError: a capacity below what is committed already.
    """

    def __init__(self, target: Target, state: DecodeState, *, capacity: int, max_nodes: int, max_depth: int):
        self.target, self.state = target, state
        state.fix_shapes(capacity, max_nodes)
        batch, device = state.batch_size, target.device
        self.max_nodes, self.max_depth = max_nodes, max_depth
        self._tokens = torch.zeros(batch, max_nodes, dtype=torch.int64, device=device)
        self._parents = torch.zeros(batch, max_nodes, dtype=torch.int64, device=device)
        self._parents[:, 0] = -1
        self._valid = torch.ones(batch, max_nodes, dtype=torch.bool, device=device)
        self._lengths = state.device_lengths(device)
        self._nodes = torch.full((batch,), -1, device=device)
        self._source = torch.full((batch, max_depth + 1), capacity, device=device)
        self._destination = self._source.clone()
        self._out: VerifyOutput | None = None
        self._tables: TreeTables | None = None
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def verify(self, tokens: Tensor, tree: Tree) -> VerifyOutput:
        """As `Target.verify`; the output's tensors are overwritten by the next call.

        Raises:
            ValueError: a tree with more nodes or levels than the step was made for, or no room left in the state.
        """
        nodes, depth = tree.num_nodes, tree.max_depth
        if nodes > self.max_nodes or depth > self.max_depth:
            raise ValueError(
                f"the step was made for {self.max_nodes} nodes and depth {self.max_depth}, the tree has {nodes} and "
                f"{depth}"
            )
        self.state.check_room(depth + 1)
        self._tokens[:, :nodes] = tokens
        self._parents[:, 1:] = 0  # padding hangs on the root
        self._parents[:, :nodes] = tree.parents
        self._valid[:] = False
        self._valid[:, :nodes] = tree.valid.to(self.target.device)
        self._lengths.copy_(self.state.device_lengths(self.target.device))
        self._run("verify", self._verify_once)
        self.state.pending = tree
        assert self._out is not None
        return VerifyOutput(self._out.logits[:, :nodes], self._out.features[:, :nodes])

    @torch.no_grad()
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """As `Target.commit` of the state.

        Raises:
            ValueError: no verify before, or a path that the tree does not have.
        """
        state = self.state
        if state.pending is None:
            raise ValueError("commit without a verify: verify first, once per commit")
        check_paths(paths, state.pending, state.batch_size)
        self._nodes.copy_(torch.tensor([path[-1] if path else -1 for path in paths]))
        columns = accepted_columns(paths, state.lengths, state.start)
        for static, moves in zip((self._source, self._destination), columns or (None, None), strict=True):
            static.fill_(state.start)  # the root onto itself: nothing moves
            if moves is not None:
                static[:] = moves[:, -1:].to(static.device)
                static[:, : moves.shape[1]] = moves.to(static.device)
        self._run("commit", self._commit_once)
        state.advance([len(path) for path in paths])

    def _verify_once(self) -> None:
        self._tables = TreeTables.from_parents(self._parents, self.max_depth)
        self._out = self.target.verify_on_device(
            self.state.cache, self.state.start, self._lengths, self._tokens, self._tables, self._valid
        )

    def _commit_once(self) -> None:
        assert self._tables is not None
        self.state.cache.commit(self._tables, self._nodes, (self._source, self._destination))

    def _run(self, name: str, work: Callable[[], None]) -> None:
        if self.target.device.type != "cuda":
            work()
            return
        if name not in self._graphs:
            self._graphs[name] = self._capture(work)
        self._graphs[name].replay()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        # Kernels compile and libraries allocate workspaces on first use, which a capture cannot hold: run it before, on
        # a side stream as CUDA asks, with a commit that changes nothing. Capturing itself runs nothing.
        static = (self._nodes, self._source, self._destination)
        kept = [tensor.clone() for tensor in static]
        for tensor, nothing in zip(static, (-1, self.state.start, self.state.start), strict=True):
            tensor.fill_(nothing)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for tensor, value in zip(static, kept, strict=True):
            tensor.copy_(value)
        return graph
