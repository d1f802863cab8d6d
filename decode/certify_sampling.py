"""Evidence that what is sampled with drafts has the target's own distribution: many rows of one prompt, counted.

The whole of `generate` runs, with this target and this draft. The exact probabilities of every text come from the
unmodified transformers model and its own warpers; Pearson's chi-square compares.
"""

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftwood.decode import generate as loop
from draftwood.decode.certificate import Evidence

if TYPE_CHECKING:
    from draftwood.models.target import Target

SETTINGS = dict(temperature=1.0, top_k=4, top_p=0.95)
# A sound verifier fails one test in so many by chance; the seed is fixed, so a rerun says the same.
SIGNIFICANCE = 1e-4
# In low precision rounding can move a token across the edge of top-k or top-p: so large a share of the rows may hold a
# text that the reference forward excludes. In float32 none may.
LOW_PRECISION_EDGE = 0.05
_FEWEST = 5  # expected rows of a text that is counted by itself; rarer ones are counted together


def certify_sampling(
    target: "Target", draft: Any, prompt: Tensor, tree: Any, *, rows: int, length: int, seed: int
) -> Evidence:
    """The distribution of the first `length` tokens of `rows` continuations of `prompt` [1, T].

    Args:
        tree: what the draft fills.
    """
    prompt = prompt.to(target.device)
    chances = _exact(target, prompt, length)
    out = loop.generate(
        target,
        draft,
        prompt.expand(rows, -1).contiguous(),
        tree=tree,
        max_new_tokens=length,
        seed=seed,
        eos_token_ids=[],
        **SETTINGS,  # type: ignore[arg-type]
    )
    counts = Counter(tuple(text[:length]) for text in out.tokens)
    statistic, freedom, impossible = chi_square(counts, chances, rows)
    allowed = 0 if target.dtype in (torch.float32, torch.float64) else int(LOW_PRECISION_EDGE * rows)
    chance = chi_square_tail(statistic, freedom) if impossible <= allowed else 0.0
    accepted = sum(f.accepted for row in out.rows for f in row.forwards)
    name = f"sampling, {'the draft alone' if tree is None else tree}"
    detail = f"{rows} rows of {length} tokens, {accepted} drafts accepted: chi-square {statistic:.1f} with {freedom} "
    detail += f"degrees of freedom, p {chance:.2g}, limit {SIGNIFICANCE:.0e}"
    if impossible:
        detail += f"; {impossible} rows with a text beyond top-k or top-p, {allowed} allowed for rounding"
    figures = {
        **SETTINGS,
        "rows": rows,
        "tokens": length,
        "texts": len(chances),
        "drafts_accepted": accepted,
        "chi_square": statistic,
        "degrees_of_freedom": freedom,
        "p_value": chance,
        "limit": SIGNIFICANCE,
        "impossible": impossible,
        "impossible_allowed": allowed,
    }
    return Evidence(name, chance > SIGNIFICANCE, detail, figures)


@torch.no_grad()
def _exact(target: "Target", prompt: Tensor, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every text of `length` tokens after `prompt`, by the model's plain forward."""
    top_k, top_p = int(SETTINGS["top_k"]), SETTINGS["top_p"]
    warp = LogitsProcessorList(
        [TemperatureLogitsWarper(SETTINGS["temperature"]), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)]
    )
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        texts = list(chances)
        ids = torch.cat([prompt.expand(len(texts), -1), prompt.new_tensor(texts).view(len(texts), -1).long()], 1)
        logits = target.model(ids, use_cache=False).logits[:, -1]
        p = warp(ids, logits.to(torch.promote_types(logits.dtype, torch.float32))).softmax(-1).double()
        p, tokens = p.topk(min(top_k + 1, p.shape[1]), dim=-1)  # one more than top-k, should two be level
        chances = {
            (*text, token): chances[text] * q
            for text, row, row_tokens in zip(texts, p.tolist(), tokens.tolist(), strict=True)
            for token, q in zip(row_tokens, row, strict=True)
            if q > 0
        }
    return chances


def chi_square(
    counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float], rows: int
) -> tuple[float, int, int]:
    """Statistic, degrees of freedom, and how many rows have a text of probability 0."""
    ordered = sorted(chances, key=chances.__getitem__, reverse=True)
    frequent = list(itertools.takewhile(lambda text: rows * chances[text] >= _FEWEST, ordered))
    cells = [(counts[text], rows * chances[text]) for text in frequent]
    rest = rows - sum(expected for _, expected in cells)
    impossible = sum(count for text, count in counts.items() if text not in chances)
    seen = rows - sum(count for count, _ in cells) - impossible
    if rest >= _FEWEST or not cells:
        cells.append((seen, rest))
    else:  # too little for a cell of its own
        cells[-1] = (cells[-1][0] + seen, cells[-1][1] + rest)
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1, impossible


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable is larger; 1 without a degree of freedom."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    tail = float(torch.special.gammaincc(half[0], half[1]))
    return 0.0 if math.isnan(tail) else tail
