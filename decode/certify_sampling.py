"""Evidence that what is sampled with drafts has the target's own distribution: many rows of one prompt, counted.

The whole of `generate` runs, with this target and this draft. What may follow a text, and how likely it is, comes from
the unmodified transformers model and its own warpers. A token is counted among those that follow the same text, and
Pearson's chi-square compares, all texts together.

Two forwards of different width round differently, so one may keep a token at the cut of top-k or top-p that the other
drops. `rounding` bounds the change in the distance of any two logits. A token that no logits within the bound would
keep proves the verifier wrong; one that all of them would keep is counted; one between the two lies at the cut.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftwood.decode import generate as loop
from draftwood.decode.certificate import Evidence
from draftwood.decode.certify_greedy import rounding
from draftwood.decode.processors import processors_of

if TYPE_CHECKING:
    from draftwood.models.target import Target

TEMPERATURE, TOP_K, TOP_P = 1.0, 4, 0.95
# A sound verifier fails one test in so many by chance; the seed is fixed, so a rerun says the same.
SIGNIFICANCE = 1e-4
_FEWEST = 5  # expected rows of a token that is counted by itself; rarer ones are counted together
_CONTEXTS = 32  # texts of one reference forward

Text = tuple[int, ...]


class Support(NamedTuple):
    """What may follow a text.

    Attributes:
        sure: tokens that are kept however the logits are rounded, and their probabilities among themselves.
        possible: tokens that some rounding would keep, the sure ones included.
    """

    sure: dict[int, float]
    possible: set[int]


def certify_sampling(
    target: "Target", draft: Any, prompt: Tensor, tree: Any, *, rows: int, length: int, seed: int
) -> Evidence:
    """The distribution of the first `length` tokens of `rows` continuations of `prompt` [1, T].

    Args:
        tree: what the draft fills.
    """
    prompt = prompt.to(target.device)
    out = loop.generate(
        target,
        draft,
        prompt.expand(rows, -1).contiguous(),
        tree=tree,
        max_new_tokens=length,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        top_p=TOP_P,
        seed=seed,
        eos_token_ids=[],
    )
    statistic, freedom, num_at_cut, impossible = 0.0, 0, 0, []
    for depth in range(length):
        following: dict[Text, Counter[int]] = {}
        for row in out.tokens:
            following.setdefault(tuple(row[:depth]), Counter())[row[depth]] += 1
        for text, support in _supports(target, prompt, list(following), length).items():
            counts = following[text]
            own, own_freedom = chi_square(counts, support.sure)
            statistic, freedom = statistic + own, freedom + own_freedom
            num_at_cut += sum(counts[token] for token in support.possible - support.sure.keys())
            impossible += [(text, token) for token in counts if token not in support.possible]
    chance = chi_square_tail(statistic, freedom)
    accepted = sum(f.accepted for row in out.rows for f in row.forwards)
    name = f"sampling, {'the draft alone' if tree is None else tree}"
    detail = f"{rows} rows of {length} tokens, {accepted} drafts accepted: chi-square {statistic:.1f} with {freedom} "
    detail += f"degrees of freedom, p {chance:.2g}, limit {SIGNIFICANCE:.0e}"
    if num_at_cut:
        detail += f"; {num_at_cut} of {rows * length} tokens so near the cut of top-k or top-p that rounding decides"
    if impossible:
        text, token = impossible[0]
        detail += f"; {len(impossible)} texts go on beyond top-k or top-p, as {list(text)} with {token}"
    figures = {
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "top_p": TOP_P,
        "rows": rows,
        "tokens": length,
        "drafts_accepted": accepted,
        "chi_square": statistic,
        "degrees_of_freedom": freedom,
        "p_value": chance,
        "limit": SIGNIFICANCE,
        "tokens_at_the_cut": num_at_cut,
        "impossible": [[*text, token] for text, token in impossible],
    }
    return Evidence(name, not impossible and chance > SIGNIFICANCE, detail, figures)


@torch.no_grad()
def _supports(target: "Target", prompt: Tensor, texts: list[Text], length: int) -> dict[Text, Support]:
    """What may follow `prompt` [1, T] and each of the texts, all of one length, by the model's plain forward and the
    processors of its own generation config."""
    processors = processors_of(target, None, [], length)(prompt.shape[1])
    found = {}
    for start in range(0, len(texts), _CONTEXTS):
        some = texts[start : start + _CONTEXTS]
        ids = torch.cat([prompt.expand(len(some), -1), prompt.new_tensor(some).view(len(some), -1).long()], 1)
        raw = target.model(ids, use_cache=False).logits[:, -1].float()
        for text, plain, logits in zip(some, raw, processors(ids, raw.clone()), strict=True):
            found[text] = find_support(logits, rounding(target.dtype, float(plain.abs().max())))
    return found


def find_support(logits: Tensor, bound: float) -> Support:
    """The tokens kept of `logits` [V], if the distance of any two of them may be wrong by `bound`.

    The extreme roundings for a token: all that lies at or below it moves up by the bound with it, and what is above by
    no more is overtaken; or all that lies lower by the bound or more moves down with it, and is overtaken by the rest.
    """
    warp = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)])
    order = logits.argsort(descending=True)
    near = logits[order].double()
    near = near[near >= near[min(TOP_K, len(near)) - 1] - bound]  # no rounding lifts another one into the top-k
    itself, own = torch.eye(len(near), dtype=torch.bool, device=near.device), near[:, None]
    raised = near + bound * (near <= own)
    lowered = near - bound * ((near <= own - bound) | itself)
    ids = order[None]
    kept = [warp(ids, moved.clone()).diagonal() > -torch.inf for moved in (raised, lowered)]
    possible, sure = (order[: len(near)][mask].tolist() for mask in kept)
    p = near[kept[1]].softmax(-1)
    return Support(dict(zip(sure, p.tolist(), strict=True)), set(possible))


def chi_square(counts: Counter[int], chances: dict[int, float]) -> tuple[float, int]:
    """Statistic and degrees of freedom of those `counts` that have a chance; 0 degrees if there are too few."""
    total = sum(counts[token] for token in chances)
    cells, rest, rest_seen = [], 0.0, 0
    for token, chance in chances.items():
        if total * chance >= _FEWEST:
            cells.append((counts[token], total * chance))
        else:
            rest, rest_seen = rest + total * chance, rest_seen + counts[token]
    if rest >= _FEWEST:
        cells.append((rest_seen, rest))
    elif cells:  # too little for a cell of its own
        cells[-1] = (cells[-1][0] + rest_seen, cells[-1][1] + rest)
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), max(len(cells) - 1, 0)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable is larger; 1 without a degree of freedom."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
