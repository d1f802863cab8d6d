"""A byte-level tokenizer of some 300 tokens trained on the spot, chat templates with the habits of real ones, and what
distillations small enough for a test run on."""

from collections.abc import Callable

import pytest
import tiny_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftwood.models.target import load_target

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the answer is written as a question about an answering answer",
    "answer user assistant system\n\n hello there you",
] * 9
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LOOP = "{% for m in messages %}"
TEMPLATES = {
    "chatml": f"{LOOP}{TURN}{{% endfor %}}{PROMPT}",
    "trims": f"{LOOP}{TURN.replace('m.content', 'm.content | trim')}{{% endfor %}}{PROMPT}",
    "refuses system": (
        f"{LOOP}{{% if m.role == 'system' %}}{{{{ raise_exception('System role not supported') }}}}{{% endif %}}"
        f"{TURN}{{% endfor %}}{PROMPT}"
    ),
    "ignores system": f"{LOOP}{{% if m.role != 'system' %}}{TURN}{{% endif %}}{{% endfor %}}{PROMPT}",
    "alternates": (
        f"{LOOP}{{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}}"
        f"{{{{ raise_exception('Conversation roles must alternate') }}}}{{% endif %}}{TURN}{{% endfor %}}{PROMPT}"
    ),
    "drops reasoning": (
        f"{LOOP}{{% if m.role == 'assistant' and not loop.last %}}"
        + TURN.replace("m.content", "m.content.split('</think>')[-1]")
        + f"{{% else %}}{TURN}{{% endif %}}{{% endfor %}}{PROMPT}"
    ),
    "other last terminator": (
        f"{LOOP}{{{{ '<|im_start|>' + m.role + '\n' + m.content }}}}"
        "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}"
        f"{{% endfor %}}{PROMPT}"
    ),
    "no prompt": f"{LOOP}{TURN}{{% endfor %}}",
    "inst": (
        f"{LOOP}{{% if m.role == 'user' %}}{{{{ '[INST] ' + m.content + ' [/INST]' }}}}"
        "{% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    ),
    "no gap": (
        f"{LOOP}{{{{ ('ans' if m.role == 'assistant' else 'user:') + m.content + '<|im_end|>' }}}}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ans' }}{% endif %}"
    ),
}


@pytest.fixture(scope="session")
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


@pytest.fixture
def chat_tokenizer(_backend: str) -> Callable[[str], PreTrainedTokenizerFast]:
    """A fresh tokenizer with the chat template of that name."""

    def make(template: str = "chatml") -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(_backend),
            eos_token="<|im_end|>",
            bos_token="<|im_start|>",
            pad_token="<|endoftext|>",
            chat_template=TEMPLATES[template],
        )

    return make


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder with a tiny target and conversations, as `tiny_run.make` writes them."""
    folder = tmp_path_factory.mktemp("workshop")
    tiny_run.make(folder)
    return folder


@pytest.fixture(scope="module")
def target(workshop):
    return load_target(str(workshop / "target"))
