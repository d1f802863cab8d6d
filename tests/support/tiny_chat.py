"""A tiny model with a tokenizer: every byte is a token, so that characters are split as badly as can be."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftwood.decode.screen import Screen

SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Bytes and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=template
    )
    return made


def save(folder: Path) -> Path:
    """Writes a tiny Llama and its tokenizer into `folder`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(3)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class Recorder(Screen):
    """Keeps what is shown: `pieces`, (text, is_draft) each, and `statuses`. Ctrl-C comes after `stop_after` pieces."""

    def __init__(self, stop_after: int | None = None):
        super().__init__()
        self.pieces: list[tuple[str, bool]] = []
        self.statuses: list[str] = []
        self.stop_after = stop_after

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def write(self, text: str, is_draft: bool = False) -> None:
        self.pieces.append((text, is_draft))
        if len(self.pieces) == self.stop_after:
            raise KeyboardInterrupt

    def show(self, status: str) -> None:
        self.statuses.append(status)

    def end(self) -> None:
        pass
