"""A distillation small enough for a test: a random target with a tokenizer of words, conversations, a configuration."""

import json
import random
from pathlib import Path

import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftwood.configs.load import load_config
from draftwood.configs.schema import RunConfig

_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m.role + ' ' + m.content + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system"]
    words += [f"w{i}" for i in range(tiny.VOCAB - len(words))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=_TEMPLATE,
    )


def conversations(count: int, seed: int = 0, longest: int = 14) -> list[dict]:
    draw = random.Random(seed)

    def words() -> str:
        return " ".join(f"w{draw.randrange(50)}" for _ in range(draw.randint(2, longest)))

    return [
        {
            "id": f"c{i}",
            "conversations": [
                {"from": role, "value": words()} for _ in range(draw.randint(1, 2)) for role in ("human", "gpt")
            ],
        }
        for i in range(count)
    ]


def make(folder: Path, family: str = "llama", count: int = 29) -> None:
    """Writes `target/`, a transformers folder, and `rows.jsonl`."""
    tiny.build(family).save_pretrained(folder / "target")
    tokenizer().save_pretrained(folder / "target")
    lines = [json.dumps(row) for row in conversations(count)]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")


def config(folder: Path, *overrides: str) -> RunConfig:
    """A run in `folder`: 3 align steps, 24 training rows and 5 held out, float32."""
    return load_config(None, [*overrides_for(folder), *overrides])


def overrides_for(folder: Path) -> list[str]:
    return [
        f"output={folder}",
        f"target.name={folder}/target",
        f"data.source={folder}/rows.jsonl",
        f"data.folder={folder}/data",
        "target.device=cpu",
        "data.num_validation=5",
        "data.max_length=40",
        "data.num_proc=1",
        "loop.mixed_precision=none",
        "loop.batch_size=4",
        "loop.epochs=2",
        "loop.log_every=1",
        "loop.save_every=100",
        "optimizer.lr=0.01",
    ]


def log_of(config: RunConfig, kind: str = "train") -> list[dict]:
    """What the run of `config` has logged of that kind."""
    lines = (Path(config.output) / config.name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]
