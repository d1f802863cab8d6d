"""What prepared rows depend on, as digests, and whether they fit a target's vocabulary."""

import hashlib
from pathlib import Path

from draftwood.train.report import RowAccount


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_token_ids(data_folder: Path, vocab_size: int) -> None:
    """That prepared rows hold no token which the target has no embedding for: a tokenizer may know more than a model.

    Raises:
        ValueError: the largest id of the rows is not below `vocab_size`.
    """
    largest = RowAccount.load(data_folder).max_token_id
    if largest >= vocab_size:
        raise ValueError(
            f"the rows in {data_folder} hold token {largest}, but the target's vocabulary has {vocab_size}: its "
            "tokenizer has tokens that the model was not made for; take the tokenizer that belongs to it"
        )
