"""transformers' logits processors on a tree: each node's logits are processed with the text that leads to it.

A processor is called as by transformers' `generate`: ids [m, length] of prompt, output and the node's path, without
padding, and scores [m, V] in float32. It must depend on nothing else: nodes that are not kept are asked as well.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import PrefixConstrainedLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor

from draftwood.decode.tree import Tree

if TYPE_CHECKING:
    from draftwood.models.target import Target

# Fields whose processors need more than the text of one node, and the value at which each does nothing.
_REFUSED = {
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
}
_REFUSED_CLASSES = (PrefixConstrainedLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


class PathProcessors:
    """The processors of one batch.

    Args:
        make: the list for a prompt of so many tokens.
        prompts: [T_b] int64 each, without padding.
    """

    def __init__(self, make: Callable[[int], LogitsProcessorList], prompts: Sequence[Tensor]):
        self.prompts = prompts
        self.lists = {length: make(length) for length in {len(prompt) for prompt in prompts}}

    @property
    def is_empty(self) -> bool:
        return not any(self.lists.values())

    def __call__(
        self, logits: Tensor, texts: Sequence[list[int]], rows: Sequence[int], tokens: Tensor, tree: Tree
    ) -> Tensor:
        """Processed logits, float32 or float64, of `logits` [B, n, V].

        Args:
            texts: what each row has emitted, its root included.
            rows: those that are still decoded; others keep their logits.
            tokens: [B, n] int64, the tokens at the nodes of `tree`; the root's is not read.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        drafted, groups = tokens.tolist(), defaultdict(list)
        for b in rows:
            for node in range(tree.num_nodes):
                path = [drafted[b][n] for n in tree.path(node, b)[1:]]
                groups[len(self.prompts[b]), len(texts[b]) + len(path)].append((b, node, texts[b] + path))
        for (length, _), members in groups.items():
            of_rows, nodes, ends = map(list, zip(*members, strict=True))
            end = torch.tensor(ends, dtype=torch.int64, device=logits.device)
            ids = torch.cat([torch.stack([self.prompts[b] for b in of_rows]), end], 1)
            scores[of_rows, nodes] = self.lists[length](ids, scores[of_rows, nodes])
        return scores


def processors_of(
    target: "Target", config: GenerationConfig | None, ends: Sequence[int], max_new_tokens: int
) -> Callable[[int], LogitsProcessorList]:
    """How transformers' `generate` makes the processors of `config`, by the length of the prompt.

    Args:
        config: None: the target's own.
        ends: tokens that end the text, for processors that hold it back or force it.

    Raises:
        ValueError: a field whose processor can't act on the paths of a tree.
    """
    config = copy.deepcopy(target.model.generation_config if config is None else config)
    for name, idle in _REFUSED.items():
        value = getattr(config, name, None)
        if value not in idle:
            raise ValueError(f"generation config: {name} is {value}, which is not supported here; set it to {idle[0]}")
    config.do_sample = False  # temperature, top-k and top-p are applied where the tokens are drawn
    config.renormalize_logits = None  # changes no probability
    config._eos_token_tensor = torch.tensor(list(ends), device=target.device) if ends else None

    def make(prompt_length: int) -> LogitsProcessorList:
        config.max_length = prompt_length + max_new_tokens
        return target.model._get_logits_processor(
            config, input_ids_seq_length=prompt_length, device=str(target.device), model_kwargs={}
        )

    return make


def with_custom(
    make: Callable[[int], LogitsProcessorList], custom: LogitsProcessor | Sequence[LogitsProcessor] | None
) -> Callable[[int], LogitsProcessorList]:
    """`make`, and behind its processors the user's own.

    Raises:
        ValueError: one that can't act on the paths of a tree.
    """
    own = [] if custom is None else [custom] if callable(custom) and not isinstance(custom, list) else list(custom)
    for processor in own:
        if isinstance(processor, _REFUSED_CLASSES):
            raise ValueError(
                f"logits_processor: {type(processor).__name__} needs more than a path's text; leave it out"
            )
    return lambda length: LogitsProcessorList([*make(length), *own])
