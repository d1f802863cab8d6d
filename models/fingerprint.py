"""What an output depends on, as digests: a target's weights, a tokenizer's rules."""

import json
from hashlib import sha256

from transformers import PreTrainedTokenizerBase

from draftwood.models.target import Target


def fingerprint(target: Target) -> str:
    """Names a target's weights: its sizes and types, and a few values of every parameter."""
    digest = sha256(json.dumps(target.config.to_diff_dict(), sort_keys=True, default=str).encode())
    for name, parameter in target.model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // 64)].float().cpu().numpy()
        digest.update(f"{name}{list(parameter.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()


def tokenizer_settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What of a tokenizer decides which rows come out: the digests of its vocabulary and rules, and of its template."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # Left behind by whoever called the tokenizer last; rows are neither padded nor truncated by it.
    state.pop("padding", None)
    state.pop("truncation", None)
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return {"tokenizer_sha256": _sha256(json.dumps(state)), "template_sha256": _sha256(template)}


def _sha256(text: str) -> str:
    return sha256(text.encode()).hexdigest()
