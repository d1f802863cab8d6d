"""A GGUF file of SmolLM2 as a plain transformers folder, so that it loads fast and without `gguf` afterwards."""

from pathlib import Path


def convert_smollm2(gguf_file: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a SmolLM2 GGUF file into `folder`.

    The weights are float32: a dequantised value is scale * integer + minimum, which neither bfloat16 nor float16 holds
    exactly (97 % and 79 % of the embedding would change), and nothing may be lost on top of the quantisation.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    dequantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**source)
    config.dtype = torch.float32
    # transformers refuses to save a model that was read from GGUF, so the weights move into an ordinary one.
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dequantised.state_dict())
    model.generation_config = dequantised.generation_config
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The GGUF says `tokenizer.ggml.pre = smollm`: digits stand alone before the byte-level split. transformers' GGUF
    # reader leaves that out, and then a space before a number falls to another token.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
