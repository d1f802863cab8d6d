"""A `GenerationConfig` read as transformers' `generate` reads it, into the settings of ours."""

from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

if TYPE_CHECKING:
    from draftwood.models.target import Target

# Fields that would change what is returned and are not supported, with the values at which they do nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "max_time": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
}
_REFUSED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_p": (None,),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
}


def read_config(target: "Target", config: GenerationConfig, prompt_width: int) -> dict[str, Any]:
    """Settings of `generate`; what `config` leaves out is the target's own, then transformers' default.

    Args:
        prompt_width: tokens of the prompts, padding included, which `max_length` counts too.

    Raises:
        ValueError: a field that is not supported, or a `max_length` that leaves nothing to generate.
    """
    own = target.model.generation_config
    is_bounded = any(c.max_new_tokens is not None or c.max_length is not None for c in (config, own))
    full = target.model._prepare_generation_config(config)[0]
    for name, idle in (_REFUSED | (_REFUSED_SAMPLING if full.do_sample else {})).items():
        value = getattr(full, name, None)
        if value not in idle:
            raise ValueError(f"generation config: {name} is {value}, which is not supported here; set it to {idle[-1]}")
    if full.max_new_tokens is not None or not is_bounded:
        max_new_tokens = full.max_new_tokens or full.max_length
    else:
        max_new_tokens = full.max_length - prompt_width
        if max_new_tokens < 1:
            raise ValueError(
                f"generation config: max_length is {full.max_length} and the prompts are {prompt_width} tokens wide; "
                "set a larger one, or max_new_tokens"
            )
    sampling: dict[str, Any] = dict(temperature=0.0, top_k=None, top_p=None)
    if full.do_sample:
        sampling = dict(temperature=full.temperature, top_k=full.top_k or None, top_p=full.top_p)
    ends = full.eos_token_id
    return {
        "max_new_tokens": max_new_tokens,
        **sampling,
        "eos_token_ids": [] if ends is None else ends,
        "stop_strings": full.stop_strings,
        "generation_config": full,
    }
