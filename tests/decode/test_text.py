import tiny_chat
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.decode.text import TextStream

TOKENIZER = tiny_chat.tokenizer()


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="aé漢🦊 \n", max_size=20), st.lists(st.integers(0, 5), max_size=60))
def test_pieces_add_up_to_the_text_and_none_has_a_broken_character(text, sizes):
    tokens = TOKENIZER(text)["input_ids"]
    stream, pieces = TextStream(TOKENIZER), []
    for size in [*sizes, len(tokens)]:
        pieces.append(stream.add(tokens[:size]))
        tokens = tokens[size:]
    pieces.append(stream.finish())
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_cut_off_at_the_end_is_shown_as_such():
    tokens = TOKENIZER("a漢")["input_ids"][:-1]
    stream = TextStream(TOKENIZER)
    assert stream.add(tokens) == ""
    assert stream.finish() == "a\N{REPLACEMENT CHARACTER}"


def test_decoding_starts_near_the_new_tokens_however_long_the_text():
    stream, lengths = TextStream(TOKENIZER), []
    decode = stream._decode
    stream._decode = lambda tokens: lengths.append(len(tokens)) or decode(tokens)
    for token in TOKENIZER("word " * 40)["input_ids"]:
        stream.add([token])
    assert max(lengths) <= 2
