"""`draftwood certify`: the evidence that decoding with this draft gives what the target gives alone."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftwood.decode.certificate import Certificate, Evidence, hash_tensors
from draftwood.decode.certify_greedy import certify_greedy
from draftwood.decode.certify_sampling import certify_sampling
from draftwood.decode.certify_state import certify_states
from draftwood.decode.enumeration import certify_rules
from draftwood.decode.evaluate import describe_machine
from draftwood.decode.prompts import encode_messages
from draftwood.decode.propose import Proposer
from draftwood.decode.tree import Tree
from draftwood.models import gates
from draftwood.models.checkpoint import weights_sha256

if TYPE_CHECKING:
    from draftwood.models.target import Target

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Count from one to twenty in words.",
    "def fibonacci(n):",
    "Explain in two sentences why the sky is blue.",
    "Translate into French: The weather is fine today.",
    "List three uses of a paper clip.",
    "What is 17 times 23? Think step by step.",
)
TREES: tuple[Any, ...] = ("chain-4", "stree", "dynamic-16")
# What is sampled: a fixed tree and a drawn one, small, because many rows are run at once.
SAMPLED: tuple[Any, ...] = (Tree.from_parents([-1, 0, 0, 1]), "sampled-3x2")
_SHORT = 4  # tokens of the prompt that is continued many times


def certify(
    target: "Target",
    draft: Any,
    *,
    folder: str | Path | None = None,
    prompts: Sequence[Tensor] | None = None,
    trees: Sequence[Any] | None = None,
    sampled_trees: Sequence[Any] | None = None,
    max_new_tokens: int | None = None,
    rows: int | None = None,
    quick: bool = False,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> Certificate:
    """Runs every check; one that raises has failed, and its error is its detail.

    Args:
        draft: any draft, or a `Proposer`, which is run as it is.
        folder: of the draft's checkpoint, or its name, for the hash of its weights.
        prompts: [1, T] int64 each; None takes the built-in ones.
        trees: what the draft fills, greedily; None: `TREES`, or for a `Proposer` what it proposes by itself.
        sampled_trees: the same for sampling; None: `SAMPLED`.
        max_new_tokens: of a greedy output.
        rows: continuations that are sampled.
        quick: fewer prompts, tokens, rows and cases: of the order of 20 seconds on a model of 135M parameters.
        seed: of the sampling.
        on_progress: called with what is being checked.
    """
    is_proposer = isinstance(draft, Proposer)
    trees = list(trees or ([None] if is_proposer else TREES))
    sampled_trees = list(sampled_trees or ([None] if is_proposer else SAMPLED))
    prompts = list(prompts) if prompts else built_in_prompts(target, 3 if quick else len(PROMPTS))
    max_new_tokens = max_new_tokens or (16 if quick else 48)
    rows = rows or (128 if quick else 1024)
    length = 3 if quick else 4
    steps = 8 if quick else 16
    if is_proposer and trees != [None]:
        raise ValueError("trees are filled by a draft; a Proposer brings its own, so leave `trees` out")
    certificate = Certificate(
        subject=_subject(target, draft, folder, whole=not quick),
        settings={
            "prompts": len(prompts),
            "max_new_tokens": max_new_tokens,
            "trees": [str(tree) for tree in trees],
            "sampled_trees": [str(tree) for tree in sampled_trees],
            "rows": rows,
            "quick": quick,
            "seed": seed,
        },
        versions=describe_machine(target)["versions"],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )

    def attempt(name: str, check: Callable[[], list[Evidence]]) -> None:
        if on_progress is not None:
            on_progress(name)
        try:
            certificate.evidence += check()
        except Exception as error:  # whatever a verifier raises, it has not decoded
            certificate.evidence.append(Evidence(name, False, f"{type(error).__name__}: {error}"))

    attempt("acceptance rules", lambda: certify_rules(quick, seed))
    attempt("state after each commit", lambda: certify_states(target, prompts, steps))
    attempt("greedy", lambda: certify_greedy(target, draft, prompts, trees, max_new_tokens))
    short = prompts[0][:, -_SHORT:]
    for tree in sampled_trees:
        attempt(
            "sampling",
            lambda tree=tree: [  # type: ignore[misc]
                certify_sampling(target, draft, short, tree, rows=rows, length=length, seed=seed)
            ],
        )
    return certificate


def built_in_prompts(target: "Target", count: int) -> list[Tensor]:
    """The first of `PROMPTS`, each [1, T] int64; without a tokenizer, tokens spread over the vocabulary.

    Raises:
        ValueError: there are not so many.
    """
    check_built_in(count)
    if target.tokenizer is None:
        return [gates.probe_ids(target, 5 + 3 * number) for number in range(count)]
    return [encode_messages(target.tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS[:count]]


def check_built_in(count: int) -> None:
    """Raises:
    ValueError: there are not so many built-in prompts.
    """
    if count > len(PROMPTS):
        raise ValueError(f"--num-prompts is {count}; there are {len(PROMPTS)} built-in prompts, --prompts takes others")


def _subject(target: "Target", draft: Any, folder: str | Path | None, whole: bool) -> dict[str, Any]:
    """What is certified; `whole` hashes all of the target's weights, not only its head."""
    machine = describe_machine(target)
    digest = None if folder is None else weights_sha256(folder)
    if digest is None and isinstance(draft, nn.Module):
        digest = hash_tensors(dict(draft.state_dict()))
    return {
        "target": target.name,
        "target_family": target.config.model_type,
        "target_head_sha256": hash_tensors({"head": target.head_weight}),
        "target_weights_sha256": hash_tensors(dict(target.model.state_dict())) if whole else None,
        "draft": str(folder) if folder is not None else getattr(draft, "kind", type(draft).__name__),
        "draft_kind": getattr(draft, "kind", type(draft).__name__),
        "draft_sha256": digest,
        "dtype": machine["dtype"],
        "device": machine["device"],
        "threads": torch.get_num_threads(),
    }
