"""The decode cache: transformers' cache protocol, with room for a token tree that is not committed.

Outside a tree forward it behaves as transformers' own dynamic cache. While a tree is active nothing committed is
written: keys and values of the nodes go behind the committed columns, and a recurrent layer only keeps what its replay
needs (the inputs of the conv and of the scan, no state per node).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from draftwood.kernels.tables import TreeTables
from draftwood.kernels.tree_conv import tree_conv_commit


class Replay(Protocol):
    """What a tree scan hands over in place of a final state."""

    def advance(self, state: Tensor, tables: TreeTables, nodes: Tensor) -> Tensor: ...


class KeyValueBuffer:
    """Keys and values [B, Hkv, capacity, Dh] of one layer; the first columns are committed, the next are tree nodes."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Writes [B, Hkv, t, Dh] at column `start` and returns the views of all columns up to there."""
        end = start + keys.shape[2]
        self.keys = self._reserve(self.keys, keys, start, end)
        self.values = self._reserve(self.values, values, start, end)
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]

    @staticmethod
    def _reserve(buffer: Tensor | None, like: Tensor, start: int, end: int) -> Tensor:
        if buffer is not None and end <= buffer.shape[2]:
            return buffer
        # Half as much again: a growing sequence is copied a logarithmic number of times.
        capacity = max(end + 64, end * 3 // 2)
        batch, heads, _, width = like.shape
        # zeros: columns beyond a row's length are masked, but 0 * NaN of uninitialised memory would still be NaN
        grown = like.new_zeros(batch, heads, capacity, width)
        if buffer is not None:
            grown[:, :, :start] = buffer[:, :, :start]
        return grown

    def resize(self, used: int, capacity: int) -> None:
        """Keeps the first `used` columns, in buffers of `capacity`; the others are zero."""
        assert self.keys is not None and self.values is not None, "resize before any write"
        for name, old in (("keys", self.keys), ("values", self.values)):
            new = old.new_zeros(old.shape[0], old.shape[1], capacity, old.shape[3])
            new[:, :, :used] = old[:, :, :used]
            setattr(self, name, new)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copies column source[b, k] to destination[b, k], both [B, K] int64, for every row b."""
        for buffer in (self.keys, self.values):
            assert buffer is not None, "move before any write"
            if source.shape[0] == 1:
                buffer[:, :, destination[0]] = buffer[:, :, source[0]]
            else:
                shape = (source.shape[0], buffer.shape[1], source.shape[1], buffer.shape[3])
                picked = buffer.gather(2, source[:, None, :, None].expand(shape))
                buffer.scatter_(2, destination[:, None, :, None].expand(shape), picked)

    def column_bytes(self) -> int:
        """Bytes of one column of one row."""
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in (self.keys, self.values) if b is not None)


class _AttentionPart(CacheLayerMixin):
    """A layer with keys and values; the nodes of a tree, and new tokens outside one, are written from `start` on.

    `start` is the number of committed columns, of the longest row in a ragged batch, unless the state has fixed shapes.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)
        self.buffer = KeyValueBuffer()
        self.start = 0
        self.is_tree_active = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffer takes its shape from the first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        views = self.buffer.write(key_states, value_states, self.start)
        if not self.is_tree_active:
            self.start += key_states.shape[2]
        return views

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.start

    def get_max_length(self) -> int:
        return -1


class _RecurrentPart(LinearAttentionLayer):
    """A layer with a conv window and, unless it is a bare convolution, a recurrent state."""

    def __init__(self) -> None:
        LinearAttentionLayer.__init__(self)
        self.is_tree_active = False
        self.conv_inputs: Tensor | None = None
        self.replay: Replay | None = None

    @property
    def window(self) -> Tensor:
        """Committed conv window [B, C, W], the newest input last."""
        window = self.conv_states[0]
        assert window is not None, "tree forward before prefill"
        return window

    @property
    def state(self) -> Tensor:
        """Committed recurrent state, its shape the family's."""
        state = self.recurrent_states[0]
        assert state is not None, "tree forward before prefill"
        return state

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if not self.is_tree_active:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        self.conv_inputs = conv_states
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        if not self.is_tree_active:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.replay = recurrent_states  # in a tree forward the scan returns its replay in place of a final state
        return recurrent_states

    def commit(self, tables: TreeTables, nodes: Tensor) -> None:
        """Advances window and state to the accepted nodes [B]; -1 leaves a row as it is."""
        if self.conv_inputs is not None:
            self.window.copy_(tree_conv_commit(self.window, self.conv_inputs, tables, nodes))
        if self.replay is not None:
            self.state.copy_(self.replay.advance(self.state, tables, nodes))


class AttentionLayer(_AttentionPart):
    """Keys and values only."""


class RecurrentLayer(_RecurrentPart):
    """Conv window and recurrent state only."""


class RecurrentAttentionLayer(_RecurrentPart, _AttentionPart):
    """Both, for layers that run attention and a state-space mixer side by side."""

    is_compileable = False

    def __init__(self) -> None:
        _AttentionPart.__init__(self)
        _RecurrentPart.__init__(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class DecodeCache(Cache):
    """One cache layer per model layer, in the layout transformers chooses for the model's config."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=[_layer_like(layer) for layer in DynamicCache(config=config).layers])
        self.current: Any = None  # the layer whose mixer is running

    @property
    def attention_layers(self) -> list[_AttentionPart]:
        return [layer for layer in self.layers if isinstance(layer, _AttentionPart)]

    @property
    def recurrent_layers(self) -> list[_RecurrentPart]:
        return [layer for layer in self.layers if isinstance(layer, _RecurrentPart)]

    def set_tree_active(self, active: bool) -> None:
        for layer in self.layers:
            layer.is_tree_active = active

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._committed(super().get_conv_state, layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._committed(super().get_recurrent_state, layer_idx, state_idx)

    def _committed(self, read: Any, layer_idx: int, state_idx: int) -> Tensor | None:
        # A mixer that is told of a state takes its one-token branch, which writes that state in place; in a tree
        # forward it gets none, and the tree operators read the state from `current`.
        self.current = self.layers[layer_idx]
        return None if self.current.is_tree_active else read(layer_idx, state_idx)

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of one row: (conv windows and recurrent states, keys and values of one token)."""
        tensors = [t for layer in self.recurrent_layers for t in (layer.conv_states[0], layer.recurrent_states[0])]
        fixed = sum(t.element_size() * t[0].numel() for t in tensors if t is not None)
        return fixed, sum(layer.buffer.column_bytes() for layer in self.attention_layers)

    def kept_bytes(self, num_nodes: int) -> int:
        """Bytes kept until commit by the tree of `num_nodes` nodes verified last, over all rows and layers."""
        kept = 0
        for layer in self.recurrent_layers:
            tensors = [layer.conv_inputs, *(vars(layer.replay).values() if layer.replay is not None else ())]
            kept += sum(t.element_size() * t.numel() for t in tensors if isinstance(t, Tensor))
        for layer in self.attention_layers:
            assert layer.buffer.keys is not None, "kept_bytes before any forward"
            kept += layer.buffer.keys.shape[0] * layer.buffer.column_bytes() * num_nodes
        return kept

    def fix_shapes(self, start: int, max_nodes: int) -> None:
        """From now on trees are written at column `start`, into buffers of start + max_nodes columns that stay."""
        for layer in self.attention_layers:
            layer.buffer.resize(layer.start, start + max_nodes)
            layer.start = start

    def set_start(self, start: int) -> None:
        """Where the next tree is written."""
        for layer in self.attention_layers:
            layer.start = start

    def commit(self, tables: TreeTables, nodes: Tensor, columns: tuple[Tensor, Tensor] | None) -> None:
        """Makes the accepted path part of the state.

        Args:
            tables: of the verified tree.
            nodes: [B] int64, the last accepted node of each row, -1 where the row does not advance.
            columns: (source, destination) [B, K] int64 key/value columns to move; None where all are in place.
        """
        if columns is not None:
            for layer in self.attention_layers:
                layer.buffer.move(*columns)
        for layer in self.recurrent_layers:
            layer.commit(tables, nodes)


def _layer_like(layer: Any) -> Any:
    recurrent, attention = isinstance(layer, LinearAttentionLayer), isinstance(layer, CacheLayerMixin)
    if getattr(layer, "is_sliding", False):
        raise ValueError("sliding-window attention is not supported: its cache drops columns a tree may need")
    if recurrent and attention:
        return RecurrentAttentionLayer()
    if recurrent:
        return RecurrentLayer()
    return AttentionLayer() if attention else layer


def select_row(cache: DecodeCache, row: int, config: PreTrainedConfig) -> DecodeCache:
    """A cache of that row alone, a copy."""
    selected = DecodeCache(config)
    for layer, source in zip(selected.layers, cache.layers, strict=True):
        if isinstance(layer, _AttentionPart):
            layer.start = source.start
            for name in ("keys", "values"):
                setattr(layer.buffer, name, getattr(source.buffer, name)[row : row + 1].clone())
        if isinstance(layer, _RecurrentPart):
            _copy_states(layer, source, lambda state: state[row : row + 1].clone())
    return selected


def _copy_states(layer: _RecurrentPart, source: _RecurrentPart, change: Callable[[Tensor], Tensor]) -> None:
    for name in ("conv_states", "recurrent_states"):
        state = getattr(source, name)[0]
        if state is not None:
            getattr(layer, name)[0] = change(state)
    for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
        getattr(layer, name)[0] = getattr(source, name)[0]
    layer.conv_kernel_size[0] = source.conv_kernel_size[0]
    layer.dtype, layer.device = source.dtype, source.device


def merge_rows(parts: list[tuple[list[int], DecodeCache]], config: PreTrainedConfig) -> DecodeCache:
    """One cache from several whose rows were prefilled apart; each part comes with the batch rows it holds.

    Shorter rows leave columns unused at their end.
    """
    batch = sum(len(rows) for rows, _ in parts)
    merged = DecodeCache(config)
    for index, layer in enumerate(merged.layers):
        sources = [(torch.tensor(rows), cache.layers[index]) for rows, cache in parts]
        if isinstance(layer, _AttentionPart):
            layer.start = max(source.start for _, source in sources)
            for name in ("keys", "values"):
                first = getattr(sources[0][1].buffer, name)
                whole = first.new_zeros(batch, first.shape[1], layer.start + 64, first.shape[3])
                for rows, source in sources:
                    whole[rows.to(whole.device), :, : source.start] = getattr(source.buffer, name)[:, :, : source.start]
                setattr(layer.buffer, name, whole)
        if isinstance(layer, _RecurrentPart):
            _copy_states(layer, sources[0][1], lambda state: state.new_zeros(batch, *state.shape[1:]))
            for name in ("conv_states", "recurrent_states"):
                whole = getattr(layer, name)[0]
                if whole is not None:
                    for rows, source in sources:
                        whole[rows.to(whole.device)] = getattr(source, name)[0]
    return merged
