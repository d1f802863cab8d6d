"""The decoder layer of `MambaDraft`: a Mamba-2 mixer (arXiv 2405.21060) and a feed-forward layer, named as Bamba's."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.kernels.checks import blank
from draftwood.kernels.decay import accumulator_dtype, discretize
from draftwood.kernels.tables import TreeTables
from draftwood.kernels.tree_conv import tree_conv
from draftwood.kernels.tree_scan import tree_scan
from draftwood.models.harmony_scan import ChunkStates, Update, harmonized_conv, harmonized_scan
from draftwood.models.layers import FeedForward, RMSNorm

# Time steps at the start are log-uniform in this range, decay rates uniform in the other, as in Mamba-2.
_TIME_STEPS = (1e-3, 1e-1)
_RATES = (1.0, 16.0)


@dataclass(frozen=True)
class MambaShape:
    """Sizes of a draft's Mamba-2 layer, saved with its checkpoint."""

    hidden_dim: int
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    intermediate_dim: int
    norm_eps: float = 1e-6

    @property
    def inner_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner_dim + 2 * self.num_groups * self.state_dim


@dataclass
class MixerState:
    """What a mixer carries for a batch, and the tree nodes drafted since.

    Attributes:
        window: [B, K - 1, conv_dim], the last inputs of the convolution.
        scan: [B, H, P, S], float32 or wider.
        inputs, steps: [B, N, conv_dim] and [B, N, H], the nodes' inputs to convolution and discretisation.
    """

    window: Tensor
    scan: Tensor
    inputs: Tensor | None = None
    steps: Tensor | None = None


class Mixer(nn.Module):
    """Mamba-2: in_proj to gate, values, B, C and time step; short convolution; scan; gated norm; out_proj."""

    def __init__(self, shape: MambaShape):
        super().__init__()
        self.shape = shape
        self.in_proj = nn.Linear(shape.hidden_dim, shape.inner_dim + shape.conv_dim + shape.num_heads, bias=False)
        self.conv1d = nn.Conv1d(shape.conv_dim, shape.conv_dim, shape.conv_width, groups=shape.conv_dim)
        smallest, largest = (math.log(step) for step in _TIME_STEPS)
        step = torch.exp(torch.empty(shape.num_heads).uniform_(smallest, largest))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus gives the step back
        self.A_log = nn.Parameter(torch.empty(shape.num_heads).uniform_(*_RATES).log())
        self.D = nn.Parameter(torch.ones(shape.num_heads))
        self.norm = RMSNorm(shape.inner_dim, shape.norm_eps)
        self.out_proj = nn.Linear(shape.inner_dim, shape.hidden_dim, bias=False)

    def new_state(self, batch_size: int) -> MixerState:
        shape, like = self.shape, self.in_proj.weight
        window = like.new_zeros(batch_size, shape.conv_width - 1, shape.conv_dim)
        sizes = (batch_size, shape.num_heads, shape.head_dim, shape.state_dim)
        return MixerState(window, like.new_zeros(sizes, dtype=accumulator_dtype(like)))

    def extend(self, hidden: Tensor, state: MixerState, counts: Tensor | None) -> Tensor:
        """Outputs [B, t, D] of rows, the first counts[b] of which (None: all) enter `state`."""
        gate, inputs, step = self._project(hidden)
        seen = torch.cat([state.window, inputs], 1)
        x, B, C = self._convolved([seen])
        step = discretize(step, self.dt_bias, dt_softplus=True)
        columns = torch.arange(inputs.shape[1], device=inputs.device)
        if counts is not None:  # a step of 0 leaves the state as it is
            step = blank(step, columns < counts[:, None])
        states = ChunkStates(self._update(x, B, step), state.scan)
        last = inputs.shape[1] if counts is None else counts[:, None]
        kept = torch.arange(state.window.shape[1], device=inputs.device) + last
        state.window = seen.gather(1, kept.expand(len(seen), -1)[..., None].expand(-1, -1, seen.shape[-1]))
        state.scan = states.final
        return self._finish(states.read(C), x, gate)

    def expand(self, hidden: Tensor, state: MixerState, tables: TreeTables) -> Tensor:
        """Outputs [B, m, D] of new tree nodes, the last m of `tables`, which all hang below the state."""
        gate, inputs, step = self._project(hidden)
        state.inputs = inputs if state.inputs is None else torch.cat([state.inputs, inputs], 1)
        state.steps = step if state.steps is None else torch.cat([state.steps, step], 1)
        window, weight = state.window.transpose(1, 2), self.conv1d.weight[:, 0]
        convolved = tree_conv(
            state.inputs.transpose(1, 2), window, weight, tables, bias=self.conv1d.bias, activation="silu"
        )
        x, B, C = self._split(convolved.transpose(1, 2))
        y, _ = tree_scan(
            x,
            state.steps,
            self._rates(),
            B,
            C,
            tables,
            initial_state=state.scan,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        new = slice(-hidden.shape[1], None)
        return self._finish(y[:, new], x[:, new], gate)

    def align_step(self) -> Callable[[Tensor], Tensor]:
        """A function that is called once per align step, in order, on rows [B, T, D]."""
        seen: list[Tensor] = []
        updates: list[Update] = []
        states: list[ChunkStates] = []

        def step(hidden: Tensor) -> Tensor:
            gate, inputs, dt = self._project(hidden)
            seen.append(F.pad(inputs, (0, 0, self.shape.conv_width - 1, 0)))
            x, B, C = self._convolved(seen)
            updates.append(self._update(x, B, discretize(dt, self.dt_bias, dt_softplus=True)))
            if not states:
                states.append(ChunkStates(updates[0]))
            return self._finish(harmonized_scan(states[0], updates, C), x, gate)

        return step

    def _rates(self) -> Tensor:
        return -torch.exp(self.A_log.to(accumulator_dtype(self.A_log)))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [self.shape.inner_dim, self.shape.conv_dim, self.shape.num_heads]
        gate, inputs, step = self.in_proj(hidden).split(sizes, -1)
        return gate, inputs, step

    def _convolved(self, seen: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        precise = accumulator_dtype(seen[0])
        assert self.conv1d.bias is not None
        weight, bias = self.conv1d.weight[:, 0].to(precise), self.conv1d.bias.to(precise)
        return self._split(F.silu(harmonized_conv(seen, weight, bias)).to(seen[0].dtype))

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values [B, t, H, P], B and C [B, t, G, S]."""
        shape, width = self.shape, self.shape.num_groups * self.shape.state_dim
        x, B, C = convolved.split([shape.inner_dim, width, width], -1)
        return x.unflatten(-1, (-1, shape.head_dim)), *(t.unflatten(-1, (-1, shape.state_dim)) for t in (B, C))

    def _update(self, x: Tensor, B: Tensor, step: Tensor) -> Update:
        return Update(x * step[..., None], B, step * self._rates())

    def _finish(self, y: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        y = (y + self.D[:, None] * x).flatten(2)
        return self.out_proj(self.norm(y * F.silu(gate)))


class MambaLayer(nn.Module):
    """Pre-norm: mixer, then feed-forward; `run` is what the mixer does, in decoding or in an align step."""

    def __init__(self, shape: MambaShape, input_norm: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_dim, shape.norm_eps) if input_norm else None
        self.mamba = Mixer(shape)
        self.pre_ff_layernorm = RMSNorm(shape.hidden_dim, shape.norm_eps)
        self.feed_forward = FeedForward(shape.hidden_dim, shape.intermediate_dim)

    def forward(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Output [B, t, D] of input [B, t, D]."""
        x = x + run(x if self.input_layernorm is None else self.input_layernorm(x))
        return x + self.feed_forward(self.pre_ff_layernorm(x))
