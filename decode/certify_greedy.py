"""Evidence that greedy output is the target's own: token for token that of transformers' unmodified `generate`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwood.decode import generate as loop
from draftwood.decode.certificate import Evidence
from draftwood.decode.evaluate import first_difference, transformers_generate
from draftwood.decode.prompts import padded
from draftwood.decode.rehearsal import Rehearsal
from draftwood.decode.verify import Sampling

if TYPE_CHECKING:
    from draftwood.models.target import Target

# Rounding a logit costs half a unit of the dtype's precision, so the distance of two logits can differ by 2 units
# between two forwards of different width; as much again is left for the roundings before the head.
ROUNDING_UNITS = 4


@dataclass(frozen=True)
class Difference:
    """One output that differs from transformers' `generate`.

    Attributes:
        prompt: number of the prompt.
        position: first new token that differs.
        ours, theirs: the tokens there; None where the output has ended.
        top2_gap: between the target's two largest logits there.
        shortfall: by how much our token's logit is below the largest; None where we ended too early.
        threshold: a shortfall up to here is rounding.
    """

    prompt: int
    position: int
    ours: int | None
    theirs: int | None
    top2_gap: float
    shortfall: float | None
    threshold: float

    @property
    def is_legitimate(self) -> bool:
        return self.shortfall is not None and self.theirs is not None and self.shortfall <= self.threshold


def rounding(dtype: torch.dtype, largest: float) -> float:
    """By how much the distance of two logits may differ between two forwards; `largest` bounds their size."""
    return ROUNDING_UNITS * torch.finfo(dtype).eps * abs(largest)


def threshold(dtype: torch.dtype, largest: float) -> float:
    """How far below the target's best our token's logit may lie in low precision; in float32 it must be the best."""
    return 0.0 if dtype in (torch.float32, torch.float64) else rounding(dtype, largest)


@torch.no_grad()
def find_difference(
    target: "Target", prompt: int, ids: Tensor, ours: list[int], theirs: list[int]
) -> Difference | None:
    """The first difference between two continuations of `ids` [1, T], None where there is none."""
    if ours == theirs:
        return None
    position, mine, other = first_difference(ours, theirs)
    context = torch.cat([ids, ids.new_tensor([theirs[:position]])], dim=1)
    logits = target.model(context, use_cache=False).logits[0, -1].float()
    top = logits.topk(2).values.tolist()
    shortfall = None if mine is None else top[0] - float(logits[mine])
    return Difference(prompt, position, mine, other, top[0] - top[1], shortfall, threshold(target.dtype, top[0]))


def certify_greedy(
    target: "Target", draft: Any, prompts: Sequence[Tensor], trees: Sequence[Any], max_new_tokens: int
) -> list[Evidence]:
    """Greedy identity by every tree, of all prompts in one padded batch, and of a script that accepts 0 to 5 drafts.

    Args:
        prompts: [1, T] int64 each.
        trees: what the draft fills in turn.
    """
    greedy = Sampling()
    prompts = [ids.to(target.device) for ids in prompts]
    texts = [transformers_generate(target, ids, max_new_tokens, greedy) for ids in prompts]
    evidence = []
    for tree in trees:
        outputs = [
            loop.generate(target, draft, ids, tree=tree, max_new_tokens=max_new_tokens, temperature=0.0)
            for ids in prompts
        ]
        forwards = [f for out in outputs for f in out.rows[0].forwards]
        got = [out.tokens[0] for out in outputs]
        name = "greedy, the draft alone" if tree is None else f"greedy, {tree}"
        evidence.append(_judge(target, name, prompts, got, texts, max_new_tokens, sum(f.accepted for f in forwards)))
    batch, mask = padded(prompts)
    common: dict[str, Any] = dict(max_new_tokens=max_new_tokens, temperature=0.0, attention_mask=mask)
    for name, proposer, tree in (
        ("greedy, all prompts in one batch", draft, trees[0]),
        ("greedy, scripted drafts in one batch", Rehearsal(texts, target.vocab_size), None),
    ):
        out = loop.generate(target, proposer, batch, tree=tree, **common)
        accepted = sum(f.accepted for row in out.rows for f in row.forwards)
        evidence.append(_judge(target, name, prompts, out.tokens, texts, max_new_tokens, accepted))
    return evidence


def _judge(
    target: "Target",
    name: str,
    prompts: Sequence[Tensor],
    got: Sequence[list[int]],
    want: Sequence[list[int]],
    max_new_tokens: int,
    accepted: int,
) -> Evidence:
    found = [
        find_difference(target, number, ids, ours, theirs)
        for number, (ids, ours, theirs) in enumerate(zip(prompts, got, want, strict=True))
    ]
    differences = [d for d in found if d is not None]
    wrong = [d for d in differences if not d.is_legitimate]
    tokens = sum(map(len, want))
    detail = f"{len(prompts) - len(differences)} of {len(prompts)} outputs identical, {tokens} tokens"
    detail += f", {accepted} drafts accepted"
    if differences:
        first = (wrong or differences)[0]
        detail += (
            f"; {len(wrong)} beyond rounding. Prompt {first.prompt}, token {first.position}: {first.ours}, not "
            f"{first.theirs}, with a top-2 gap of {first.top2_gap:.1e}"
        )
    figures = {
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "tokens": tokens,
        "drafts_accepted": accepted,
        "differences": [{**asdict(d), "legitimate": d.is_legitimate} for d in differences],
    }
    return Evidence(name, not wrong, detail, figures)
