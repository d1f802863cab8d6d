"""The target: any supported transformers causal LM, with tree verification and commit.

transformers does the modelling. A tree forward is its own forward over all nodes at once, with positions by depth, a
4-D mask of prefix and ancestors, and the conv and scan functions of the mixers replaced (`seam.py`).
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftwood.kernels.tables import TreeTables
from draftwood.models import assets, gates, seam
from draftwood.models.cache import DecodeCache, merge_rows
from draftwood.models.families import check_rope, family_of, modeling_module
from draftwood.models.state import DecodeState, accepted_columns, attention_mask, check_paths
from draftwood.models.taps import check_taps, tapped_forward
from draftwood.models.transfer import send
from draftwood.models.tree import Tree, root_tree

# What the hub takes for a name, and nothing that can only be a path.
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class VerifyOutput:
    """Attributes:
    logits: [B, n, V] of the target after each node, given the committed prefix and the node's ancestors.
    features: [B, n, H] its hidden states after the final norm; as wide as `Target.feature_dim` where it is tapped.
    """

    logits: Tensor
    features: Tensor


class Target:
    """A frozen transformers model that verifies trees. Made by `load_target`.

    Attributes:
        model: the transformers model.
        tokenizer: its tokenizer, or None where only a model object was given.
        name: what it was loaded from.
        taps: layers whose inputs go along with the features, see `tap`.
        operators: the tree operators that `verify` runs in place of transformers' functions, by their names.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = ""):
        self.family = family_of(model.config)
        seam.install(modeling_module(model), self.family.functions)
        if self.family.prepare is not None:
            self.family.prepare(model)
        check_rope(model.config)
        seam.install_attention()
        attention = model.config.get_text_config()._attn_implementation
        if self.family.has_attention and attention not in ("sdpa", "eager"):
            raise ValueError(
                f"attention implementation '{attention}' takes no tree mask; load the model with "
                "attn_implementation='sdpa' ('eager' works too, slowly)"
            )
        self._takes_mask = self.family.has_attention and attention == "eager"
        self.operators = seam.OPERATORS
        self.taps: tuple[int, ...] = ()
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path or model.config.model_type
        self.config = model.config
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(f"{self.name}: the output head is {head}, expected a linear layer without bias")
        # last, so that a model that is refused stays as it was
        self.model: PreTrainedModel = model.eval().requires_grad_(False)
        self._head: nn.Linear = head
        self._embeddings: nn.Module = model.get_input_embeddings()
        self._backbone: nn.Module = model.base_model

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """[V, H], shared with the draft."""
        return self._head.weight

    @property
    def logit_scale(self) -> float:
        """logits = logit_scale * features @ head_weight.T"""
        return self.family.scale(self.config)

    @property
    def hidden_dim(self) -> int:
        return self.head_weight.shape[1]

    @property
    def feature_dim(self) -> int:
        """Width of the features: H, or (k + 1) H with k taps."""
        return (len(self.taps) + 1) * self.hidden_dim

    @property
    def num_layers(self) -> int:
        return self.config.get_text_config().num_hidden_layers

    def tap(self, layers: Sequence[int]) -> None:
        """From now on features are [.., (k + 1) H]: what each of `layers` reads, then the feature itself.

        Raises:
            ValueError: layers that are not there or not ascending, or a target tapped elsewhere before.
        """
        check_taps(tuple(layers), self.taps, self.num_layers, self.name)
        self.taps = tuple(layers)

    @property
    def vocab_size(self) -> int:
        return self.head_weight.shape[0]

    @property
    def final_norm(self) -> nn.Module:
        """The norm whose output the features are: the last norm the model registers outside its layers."""
        norms = [m for name, m in self._backbone.named_children() if "norm" in name]
        if len(norms) != 1:
            raise ValueError(f"{self.name}: expected one final norm beside the layers, found {len(norms)}")
        return norms[0]

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings [..., H] of `ids` [...]."""
        return self._embeddings(ids)

    def head(self, features: Tensor) -> Tensor:
        """Logits [..., V] of features [..., H], with the model's own scale; of wider ones the last H are read."""
        return self.family.scaled(self.config, self._head(features[..., -self.hidden_dim :]))

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, H], of `input_ids` [B, T].

        Padding, on either side, never enters the model's conv, scan or attention; its features are zero.
        """
        if attention_mask is None:
            return tapped_forward(self._backbone, self.taps, input_ids=input_ids, use_cache=False).to(self.dtype)
        real = attention_mask.bool()
        # Real tokens to the left in their order: all our models are causal, so what stands right of them is not seen.
        order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
        left = self.features(input_ids.gather(1, order))
        back = torch.argsort(order, dim=1)[..., None].expand(-1, -1, left.shape[-1])
        return left.gather(1, back) * real[..., None]

    @torch.no_grad()
    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, chunk_size: int | None = None
    ) -> DecodeState:
        """Takes prompts [B, T] in, padded on either side where `attention_mask` [B, T] says so.

        Rows of one length run together and rows of different length apart, so padding never reaches a state.
        `chunk_size` bounds the tokens per forward.

        Raises:
            ValueError: a row without tokens, or shapes that do not fit.
        """
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"prefill expects input_ids [B, T] with T >= 1, got {list(input_ids.shape)}")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; expected at least 1")
        input_ids = input_ids.to(self.device, torch.int64)
        if attention_mask is None:
            lengths = [input_ids.shape[1]] * input_ids.shape[0]
            rows = list(input_ids)
        else:
            if attention_mask.shape != input_ids.shape:
                raise ValueError(
                    f"attention_mask {list(attention_mask.shape)} does not fit input_ids {list(input_ids.shape)}"
                )
            rows = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask.to(self.device), strict=True)]
            lengths = [len(ids) for ids in rows]
            if 0 in lengths:
                raise ValueError(f"row {lengths.index(0)} of the prompts has no token that is not padding")
        parts = []
        features = torch.zeros(len(rows), max(lengths), self.feature_dim, dtype=self.dtype, device=self.device)
        logits = torch.empty(len(rows), self.vocab_size, dtype=self.dtype, device=self.device)
        for length in sorted(set(lengths)):
            members = [row for row, n in enumerate(lengths) if n == length]
            cache, hidden = self._prefill_equal(torch.stack([rows[row] for row in members]), chunk_size)
            features[members, :length] = hidden
            logits[members] = self.head(hidden[:, -1])
            parts.append((members, cache))
        cache = parts[0][1] if len(parts) == 1 else merge_rows(parts, self.config)
        return DecodeState(cache, lengths, features, logits)

    def _prefill_equal(self, ids: Tensor, chunk_size: int | None) -> tuple[DecodeCache, Tensor]:
        cache, hidden = DecodeCache(self.config), []
        for start in range(0, ids.shape[1], chunk_size or ids.shape[1]):
            chunk = ids[:, start : start + (chunk_size or ids.shape[1])]
            if start == 0 or self.family.continues:
                positions = torch.arange(start, start + chunk.shape[1], device=ids.device)
                hidden.append(self._forward(chunk, cache, positions))
            else:
                hidden.append(self._read_on(chunk, cache, start))
        return cache, torch.cat(hidden, 1)

    def _read_on(self, ids: Tensor, cache: DecodeCache, start: int) -> Tensor:
        """Takes `ids` [B, t] in after `start` committed tokens, as a chain; returns features [B, t, H]."""
        batch, length = ids.shape
        empty = ids.new_empty(0)
        state = DecodeState(cache, [start] * batch, empty, empty)
        hidden = self.verify(state, ids, Tree.chain(length - 1)).features
        self.commit(state, [range(length)] * batch)
        return hidden

    @torch.no_grad()
    def verify(self, state: DecodeState, tokens: Tensor, tree: Tree) -> VerifyOutput:
        """Logits and features of every node of `tree` in one forward; `state` stays as it is.

        Args:
            state: the committed prefix; its rows may have different lengths.
            tokens: [B, n] int64, one token a node; node 0 is the last emitted token, not yet in the state.
            tree: one tree for all rows, or one per row.

        Raises:
            ValueError: shapes that do not fit the state or the tree.
        """
        if tokens.shape != (state.batch_size, tree.num_nodes) or tree.num_rows not in (1, state.batch_size):
            raise ValueError(
                f"verify expects tokens [{state.batch_size}, {tree.num_nodes}] for this state and tree, got "
                f"{list(tokens.shape)} and a tree of {tree.num_rows} rows"
            )
        tables = tree.tables(self.device)
        state.check_room(tables.max_depth + 1)
        valid = None if not tree.is_padded else send(tree.valid, self.device).expand(state.batch_size, -1)
        lengths = state.device_lengths(self.device)
        out = self.verify_on_device(state.cache, state.start, lengths, tokens.to(self.device), tables, valid)
        state.pending = tree
        return out

    def verify_on_device(
        self,
        cache: DecodeCache,
        start: int,
        lengths: Tensor,
        tokens: Tensor,
        tables: TreeTables,
        valid: Tensor | None,
    ) -> VerifyOutput:
        """The part of `verify` that only issues device work; what a graph captures.

        Args:
            start: key/value column of the root; lengths: [B] int64 committed tokens.
            tokens: [B, n] int64; valid: [B, n] bool, None where no node is padding.
        """
        with seam.tree_forward(seam.TreeForward(tables, valid, lengths, cache, self.operators)):
            mask = None
            if self.family.has_attention:
                # SDPA attention is replaced and reads no mask, but transformers would build one if it got none
                mask = self._no_mask
                if self._takes_mask:
                    mask = attention_mask(lengths, start, tables, valid, self.dtype)
            hidden = self._forward(tokens, cache, lengths[:, None] + tables.depth, mask)
        return VerifyOutput(self.head(hidden), hidden)

    @cached_property
    def _no_mask(self) -> Tensor:
        return torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def commit(self, state: DecodeState, paths: Sequence[Sequence[int]]) -> None:
        """Advances `state` along one path per row of the tree verified last.

        Args:
            state: the state given to `verify`, changed in place.
            paths: node indices from the root down to the last accepted node; empty where a row does not advance.

        Raises:
            ValueError: no verify before, or a path that the tree does not have.
        """
        if state.pending is None:
            raise ValueError("commit without a verify: call target.verify(state, tokens, tree) first, once per commit")
        tree = state.pending
        check_paths(paths, tree, state.batch_size)
        nodes = send([path[-1] if path else -1 for path in paths], self.device)
        columns = accepted_columns(paths, state.lengths, state.start)
        if columns is not None:
            columns = (send(columns[0], self.device), send(columns[1], self.device))
        state.cache.commit(tree.tables(self.device), nodes, columns)
        state.advance([len(path) for path in paths])

    @torch.no_grad()
    def step(self, state: DecodeState, tokens: Tensor) -> VerifyOutput:
        """One autoregressive step: takes `tokens` [B] in and returns logits [B, 1, V] and features [B, 1, H].

        Equal to a verify of the root alone and its commit, by transformers' own one-token path where all rows have
        one length.
        """
        if state.is_ragged or state.capacity is not None:
            out = self.verify(state, tokens[:, None], root_tree())
            self.commit(state, [[0]] * state.batch_size)
            return out
        position = send([state.width], self.device)
        hidden = self._forward(tokens[:, None].to(self.device), state.cache, position)
        state.advance([1] * state.batch_size)
        return VerifyOutput(self.head(hidden), hidden)

    def _forward(self, ids: Tensor, cache: DecodeCache, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        # Positions are always given: Bamba counts from 0 otherwise, whatever its cache holds.
        inputs: dict[str, Any] = {"position_ids": positions if positions.ndim == 2 else positions[None]}
        if not self.family.has_attention:
            inputs = {}
        inputs |= {"cache": cache, "use_cache": True, "attention_mask": mask}
        hidden = tapped_forward(self._backbone, self.taps, input_ids=ids, **inputs)
        return hidden.to(self.dtype)  # Mamba2 keeps its residual, and so this, in float32


def load_target(
    model_or_path: PreTrainedModel | str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Target:
    """A target from a transformers model object, a local folder, a hub id or the name of a built-in asset.

    Args:
        dtype: torch dtype or its name; None keeps what the checkpoint is saved in.
        device: None takes the first GPU where there is one, else the CPU. A model object stays in its dtype and where
            it is; it is put into eval mode and its parameters are frozen.

    Raises:
        FileNotFoundError: neither a built-in name nor a folder, and the hub does not give it.
        ValueError: a model type or layer type that trees are not implemented for, or a gate that failed: features
            that do not reproduce the logits, or a cached forward of several tokens that this transformers gets wrong.
    """
    target = open_target(model_or_path, dtype, device)
    gates.check(target)
    return target


def open_target(
    model_or_path: PreTrainedModel | str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Target:
    """`load_target` without its gates, for a doctor."""
    if isinstance(model_or_path, PreTrainedModel):
        return Target(model_or_path)
    wanted, place = _dtype(dtype), _device(device)
    model = _from_pretrained(AutoModelForCausalLM, model_or_path, dtype=wanted)
    return Target(model.to(place), load_tokenizer(model_or_path), str(model_or_path))


def load_config(name_or_path: str | Path) -> PretrainedConfig:
    """The config of a built-in asset, local folder or hub id."""
    return _from_pretrained(AutoConfig, name_or_path)


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a built-in asset, local folder or hub id."""
    return _from_pretrained(AutoTokenizer, name_or_path)


def _from_pretrained(kind: Any, name_or_path: str | Path, **options: Any) -> Any:
    """What `kind` makes of a built-in asset, local folder or hub id.

    Raises:
        FileNotFoundError: neither a built-in name nor a folder, and the hub does not give it; the message is one line.
    """
    name = str(name_or_path)
    if assets.is_asset(name):
        return kind.from_pretrained(str(assets.asset_path(name)), **options)
    if name and Path(name).exists():
        return kind.from_pretrained(name, **options)
    built_in = [asset.name for asset in assets.ASSETS.values() if asset.convert]
    near = [] if "/" in name else difflib.get_close_matches(name, built_in, 1, 0.8)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    message = f"no model {name!r}{hint}; expected a built-in name ({', '.join(built_in)}), a folder or a hub id"
    if near or not _HUB_ID.fullmatch(name):  # the hub, where it is out of reach, is asked for half a minute
        raise FileNotFoundError(message)
    try:
        return kind.from_pretrained(name, **options)
    except OSError as error:
        raise FileNotFoundError(f"{message}. Of the hub: {str(error).splitlines()[0]}") from None


def _dtype(dtype: torch.dtype | str | None) -> Any:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype or "auto"
    found = getattr(torch, dtype, None) if dtype != "auto" else "auto"
    if not isinstance(found, torch.dtype) and found != "auto":
        raise ValueError(f"dtype '{dtype}' is not one of auto, float32, bfloat16, float16")
    return found


def _device(device: torch.device | str | None) -> torch.device:
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device '{device}' is not one torch knows; expected cpu, cuda or cuda:<n>") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device '{device}': no GPU is visible to torch; use cpu or leave it out")
    return chosen
