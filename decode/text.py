"""Bytes to text, and tokens to text as they come, without broken characters."""

from transformers import PreTrainedTokenizerBase


def read_utf8(data: bytes, name: str = "the standard input") -> str:
    """`data` as text.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: byte {error.start + 1} is 0x{data[error.start]:02x}") from None


class TextStream:
    """Turns blocks of tokens into pieces of text whose concatenation is the text of all tokens.

    A character may be spread over several tokens, and a token's text may depend on the one before it (a space that only
    shows inside a line). So a piece is the difference of two decodings that start at a token already shown, and what
    ends in the middle of a character waits for the rest.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.start = 0  # where decoding starts
        self.shown = 0  # tokens whose text is out

    def add(self, tokens: list[int]) -> str:
        """The text that `tokens` complete."""
        self.tokens += tokens
        text = self._decode(self.tokens[self.start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What still waits, as far as it can be decoded."""
        return self._take(self._decode(self.tokens[self.start :]))

    def _take(self, text: str) -> str:
        before = self._decode(self.tokens[self.start : self.shown])
        self.start, self.shown = self.shown, len(self.tokens)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
