"""Evidence that after every commit the target's state is that of a fresh prefill of the same tokens, in every layer."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwood.decode import generate as loop
from draftwood.decode.certificate import Evidence
from draftwood.decode.evaluate import transformers_generate
from draftwood.decode.prompts import padded
from draftwood.decode.rehearsal import Rehearsal, tokens_needed
from draftwood.decode.verify import Sampling
from draftwood.models import gates
from draftwood.models.cache import DecodeCache
from draftwood.models.state import DecodeState

if TYPE_CHECKING:
    from draftwood.models.target import Target


class _Watched:
    """The target, and the state of its last prefill, which the decoding loop goes on to change in place."""

    def __init__(self, target: "Target"):
        self._target = target
        self.state: DecodeState | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def prefill(self, *args: Any, **kwargs: Any) -> DecodeState:
        self.state = self._target.prefill(*args, **kwargs)
        return self.state


def certify_states(target: "Target", prompts: Sequence[Tensor], steps: int) -> list[Evidence]:
    """Decodes by a script that accepts 0 to 5 drafts, every second step without drafts, and compares after each step.

    Args:
        prompts: [1, T] int64 each; the first alone, then the first two as one ragged batch.
        steps: target forwards of each run.
    """
    prompts = [ids.to(target.device) for ids in prompts]
    evidence = [_follow(target, "state after each commit, one row", prompts[:1], steps)]
    if len(prompts) > 1:
        evidence.append(_follow(target, "state after each commit, a batch", prompts[:2], steps))
    return evidence


@torch.no_grad()
def _follow(target: "Target", name: str, prompts: list[Tensor], steps: int) -> Evidence:
    needed = tokens_needed(len(prompts), steps)
    texts = [_greedy(target, ids, needed) for ids in prompts]
    watched = _Watched(target)
    ids, mask = padded(prompts)
    blocks = loop.stream(
        watched,  # type: ignore[arg-type]  # a target in all but its class
        Rehearsal(texts, target.vocab_size),
        ids,
        attention_mask=mask,
        max_new_tokens=needed,
        eos_token_ids=[],
    )
    errors: dict[str, float] = defaultdict(float)
    accepted: set[int] = set()
    compared, limit, largest, worst = 0, gates.tolerance(target), 0.0, ""
    for block in blocks:
        if block.output.steps:
            accepted |= {row.forwards[-1].accepted for row in block.output.rows if row.forwards[-1].depth}
        state = watched.state
        assert state is not None, "a block before the prefill"
        for b, row in enumerate(prompts):
            text = row.new_tensor([block.output.tokens[b][:-1]])  # the root is not in the state yet
            whole = torch.cat([row, text], 1)
            if state.lengths[b] != whole.shape[1]:
                errors["position"] = max(errors["position"], abs(state.lengths[b] - whole.shape[1]))
            fresh = target.prefill(whole)
            for layer, part, got, want in compare_states(state.cache, fresh.cache, b, whole.shape[1]):
                error = gates.relative_error(got, want) if got.shape == want.shape else float("inf")
                if error > largest:
                    largest = error
                    worst = f"layer {layer}, {part}, after step {block.output.steps}, row {b}"
                errors[part] = max(errors[part], error)
            compared += 1
        if block.output.steps >= steps:
            break
    passed = all(error <= limit for part, error in errors.items() if part != "position")
    passed = passed and not errors.get("position")
    shown = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
    detail = (
        f"{compared} states, accepting {sorted(accepted)} drafts; largest relative error: {shown}; limit {limit:.0e}"
    )
    if not passed:
        detail += f" (worst: {worst or 'position'})"
    figures = {
        "states": compared,
        "accepted": sorted(accepted),
        "errors": dict(errors),
        "limit": limit,
        "worst": worst,
    }
    return Evidence(name, passed, detail, figures)


def compare_states(
    got: DecodeCache, want: DecodeCache, row: int, length: int
) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """(layer, part, ours, theirs) of every tensor of row `row` of `got` and of the one row of `want`."""
    for number, (mine, fresh) in enumerate(zip(got.layers, want.layers, strict=True)):
        if mine in got.attention_layers:
            for part in ("keys", "values"):
                ours, theirs = getattr(mine.buffer, part), getattr(fresh.buffer, part)
                yield number, part, ours[row, :, :length], theirs[0, :, :length]
        if mine in got.recurrent_layers:
            for part, name in (("conv window", "conv_states"), ("recurrent state", "recurrent_states")):
                ours, theirs = getattr(mine, name)[0], getattr(fresh, name)[0]
                if theirs is not None:
                    yield number, part, ours[row], theirs[0]


def _greedy(target: "Target", ids: Tensor, count: int) -> list[int]:
    """At least `count` tokens that go on greedily, past any end."""
    out = transformers_generate(target, ids, count, Sampling())
    while len(out) < count:
        more = transformers_generate(target, torch.cat([ids, ids.new_tensor([out])], 1), count - len(out), Sampling())
        out += more
    return out
