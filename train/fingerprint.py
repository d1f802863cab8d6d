"""What prepared rows depend on, as digests, and whether they fit a target."""

import hashlib
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftwood.models.fingerprint import tokenizer_settings
from draftwood.train.report import RowAccount


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_tokenizer(
    out_dir: str | Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None
) -> RowAccount:
    """The account of prepared rows, if they fit the target they are to be used with.

    Raises:
        ValueError: they were prepared with another tokenizer or chat template, or hold ids outside the vocabulary.
    """
    account = RowAccount.load(Path(out_dir))
    for key, value in tokenizer_settings(tokenizer).items():
        if account.settings[key] != value:
            what = {"tokenizer_sha256": "tokenizer", "template_sha256": "chat template"}[key]
            raise ValueError(
                f"the rows in {out_dir} were prepared with another {what} than that of {tokenizer.name_or_path!r}: "
                "prepare them again with this target's tokenizer"
            )
    if vocab_size is not None and account.max_token_id >= vocab_size:
        raise ValueError(
            f"the rows in {out_dir} hold token {account.max_token_id}, but the target's vocabulary has {vocab_size}"
        )
    return account
