"""Checks that a loaded target is what the rest relies on; a failure names what is wrong before anything runs on it."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from draftwood.models.target import Target

# Rounding of one forward against another, relative to the largest logit.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_LOW_PRECISION = 8e-2


def check(target: "Target") -> None:
    """Runs every gate.

    Raises:
        ValueError: the first gate that fails, with the error measured.
    """
    check_head(target)
    check_cached_forward(target)


def tolerance(target: "Target") -> float:
    """Largest relative error that rounding explains in the target's dtype."""
    return _TOLERANCE.get(target.dtype, _LOW_PRECISION)


def probe_ids(target: "Target", length: int) -> torch.Tensor:
    """[1, length] int64, spread over the vocabulary."""
    step = max(1, target.vocab_size // (length + 1))
    return (torch.arange(1, length + 1, device=target.device) * step % target.vocab_size)[None]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference, relative to the largest value of `want`."""
    return ((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-12)).item()


@torch.no_grad()
def check_head(target: "Target") -> float:
    """`head(features)` gives the model's logits, and features are finite and not zero; returns the relative error.

    Raises:
        ValueError: with the error and what it would do to a draft.
    """
    ids = probe_ids(target, 8)
    features = target.features(ids)
    if not bool(torch.isfinite(features).all()) or bool((features == 0).all()):
        raise ValueError(
            f"{target.name}: its features are {'zero' if bool((features == 0).all()) else 'not finite'}; a draft "
            "trained on them accepts nothing. Check the weights and the dtype"
        )
    error = relative_error(target.head(features), target.model(ids, use_cache=False).logits)
    if not error <= tolerance(target):
        raise ValueError(
            f"{target.name}: head(features) differs from the model's logits by {error:.1e} of their scale, so the "
            "features are not what the head reads (another norm, scale or soft cap); no draft can be trained on them"
        )
    return error


@torch.no_grad()
def check_cached_forward(target: "Target") -> float:
    """A prefix and then several tokens with the cache equal one forward of all; returns the relative error.

    Raises:
        ValueError: with the error; some transformers versions use only the first token or drop the state.
    """
    ids = probe_ids(target, 9)
    whole = target.features(ids)
    error = relative_error(target.head(target.prefill(ids, chunk_size=5).features), target.head(whole))
    if not error <= tolerance(target):
        raise ValueError(
            f"{target.name}: a forward of several tokens with the cache differs from one without by {error:.1e} of the "
            "logits' scale; this transformers version is wrong for the model, try another"
        )
    return error
