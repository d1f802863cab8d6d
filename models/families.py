"""The registry: what a transformers family needs so that trees can be verified on it.

A family is one line. Layer types that are not listed are refused by name when a model is loaded, never run unverified.
"""

import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

ATTENTION = frozenset({"full_attention"})
CONV = "causal_conv1d_fn"
SSD = (CONV, "mamba2_chunk_scan")
DELTA = (CONV, "torch_chunk_gated_delta_rule")
KDA = (CONV, "chunk_kimi_delta_attention")
SELECTIVE = (CONV, "mamba_selective_scan")


@dataclass(frozen=True)
class Family:
    """How one transformers model type is driven.

    Attributes:
        layers: layer types, as the config spells them, whose tree form is implemented.
        functions: module-level functions of the modeling module that a tree forward replaces.
        has_attention: whether the model takes a 4-D attention mask and positions.
        logit_scale: config field and whether it divides: logits = head(feature) * value, or / value.
        continues: whether transformers' own forward of several tokens starts from the cached state. Where it does not,
            a prompt is read on from a state by tree forwards of chains.
        prepare: what the model object needs to have set before it runs with a mask.
    """

    layers: frozenset[str]
    functions: tuple[str, ...] = ()
    has_attention: bool = True
    logit_scale: tuple[str, bool] | None = None
    continues: bool = True
    prepare: Callable[[PreTrainedModel], None] | None = None

    def scaled(self, config: PreTrainedConfig, logits: Tensor) -> Tensor:
        """The model's logits from its head's plain output, rounded as the model rounds."""
        if self.logit_scale is None:
            return logits
        name, divides = self.logit_scale
        value = getattr(config, name)
        return logits / value if divides else logits * value

    def scale(self, config: PreTrainedConfig) -> float:
        """The factor of `scaled`."""
        if self.logit_scale is None:
            return 1.0
        name, divides = self.logit_scale
        return 1 / getattr(config, name) if divides else float(getattr(config, name))


RECURRENT = frozenset({"linear_attention"})
HYBRID = ATTENTION | RECURRENT


def _every_head_has_keys(model: PreTrainedModel) -> None:
    """Latent attention expands its latents to every head; transformers would repeat them once more under a mask."""
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.num_key_value_groups = 1


FAMILIES: dict[str, Family] = {
    # attention only
    "llama": Family(ATTENTION),
    "qwen3": Family(ATTENTION),
    # Mamba-2
    "mamba2": Family(RECURRENT, SSD, has_attention=False),
    "bamba": Family(HYBRID, SSD),
    "granitemoehybrid": Family(HYBRID, SSD, logit_scale=("logits_scaling", True)),
    "falcon_h1": Family(frozenset({"hybrid"}), SSD, logit_scale=("lm_head_multiplier", False)),
    "zamba2": Family(RECURRENT | {"hybrid"}, SSD),
    "nemotron_h": Family(HYBRID | {"dummy"}, SSD),  # the cache calls its mlp and moe layers dummy
    # gated delta rule, decay per head or (Kimi) per key channel
    "qwen3_next": Family(HYBRID, DELTA),
    "qwen3_5_text": Family(HYBRID, DELTA),
    "olmo_hybrid": Family(HYBRID, DELTA),
    "kimi_linear": Family(HYBRID, KDA, prepare=_every_head_has_keys),
    # short convolution
    "lfm2": Family(ATTENTION | {"conv"}, (CONV,)),
    # Mamba-1
    "mamba": Family(RECURRENT, SELECTIVE, has_attention=False, continues=False),
    "falcon_mamba": Family(RECURRENT, SELECTIVE, has_attention=False, continues=False),
    "jamba": Family(HYBRID, SELECTIVE, continues=False),
}


# transformers picks their frequencies for a whole forward from its largest position, so a deep node, or a longer row of
# the batch, would change what a shallow node computes.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_rope(config: PreTrainedConfig) -> None:
    """Raises:
    ValueError: rotary positions whose frequencies depend on the length of the sequence.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise ValueError(
            f"rotary positions of type '{kind}' depend on the longest position of a forward, so a tree, or a row of a "
            "ragged batch, would change the others; load the model with rope_type default, linear, llama3 or yarn"
        )


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The kind of each layer, in transformers' own spelling."""
    return list(get_layer_types_and_kwargs(config)[0])


def family_of(config: PreTrainedConfig) -> Family:
    """The registered family of a config.

    Raises:
        ValueError: the model type or layer type that is not known, with those that are.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        near = difflib.get_close_matches(config.model_type, FAMILIES, 1)
        hint = f" (nearest: '{near[0]}')" if near else ""
        raise ValueError(
            f"model type '{config.model_type}' is not one draftwood can verify trees on{hint}; "
            f"known: {', '.join(sorted(FAMILIES))}"
        )
    for index, kind in enumerate(layer_types(config)):
        if kind not in family.layers:
            raise ValueError(
                f"layer {index} of this {config.model_type} model is of type '{kind}', which has no tree form here; "
                f"known for {config.model_type}: {', '.join(sorted(family.layers))}"
            )
    return family


def modeling_module(model: object) -> ModuleType:
    """The transformers module that defines the model's class, or the class it is derived from."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return sys.modules[kind.__module__]
    return sys.modules[type(model).__module__]
