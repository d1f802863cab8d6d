import pytest
import tiny_chat
import torch

import draftwood as dw
from draftwood.decode.chat import chat
from draftwood.decode.console import answer, read_utf8


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return dw.load_target(str(tiny_chat.save(tmp_path_factory.mktemp("target"))), dtype="float32")


def reader(*turns):
    """Gives the turns, raising those that are exceptions, then the end of the input."""
    left = list(turns)

    def read():
        if not left:
            raise EOFError
        turn = left.pop(0)
        if isinstance(turn, type):
            raise turn
        return turn

    return read


def test_every_turn_is_answered_with_the_whole_conversation_before_it(target):
    lines = []
    messages = chat(target, None, reader("hé", "", "you"), lambda _: None, lines.append, max_new_tokens=6)
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    for end in (1, 3):
        encoded = target.tokenizer.apply_chat_template(
            messages[:end], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = encoded["input_ids"]
        whole = target.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert messages[end]["content"] == target.tokenizer.decode(whole, skip_special_tokens=True)
    assert len(lines) == 2 and all("acceptance length" in line and "tokens/s" in line for line in lines)


def test_reset_keeps_the_system_message_alone_and_exit_ends(target):
    turns = reader("a", "/reset", "b", "/exit", "c")
    messages = chat(target, None, turns, lambda _: None, lambda _: None, system="s", max_new_tokens=2)
    assert [(m["role"], m["content"]) for m in messages[:2]] == [("system", "s"), ("user", "b")] and len(messages) == 3


def test_ctrl_c_stops_an_answer_which_stays_in_the_conversation_and_drops_a_line(target):
    written, lines = [], []

    def write(text):
        written.append(text)
        if len(written) == 4:
            raise KeyboardInterrupt

    settings = dict(max_new_tokens=30, eos_token_ids=[])
    messages = chat(target, None, reader("hé", KeyboardInterrupt), write, lines.append, **settings)
    assert messages[1]["content"] == "".join(written).removesuffix("\n\n") and lines[0].endswith("(interrupted)")
    assert len(messages) == 2


def test_accepted_drafts_are_written_apart_and_the_text_is_the_same(target):
    torch.manual_seed(0)
    draft = dw.EagleDraft.from_target(target).eval()
    for tree in ("dynamic-16", "lookup"):
        own, drafted, pieces = [], [], []
        settings = dict(max_new_tokens=40, eos_token_ids=[], tree=tree)
        output, _ = answer(
            target,
            None if tree == "lookup" else draft,
            "hé",
            lambda text, own=own, pieces=pieces: own.append(text) or pieces.append(text),
            lambda text, drafted=drafted, pieces=pieces: drafted.append(text) or pieces.append(text),
            **settings,
        )
        assert "".join(pieces) == target.tokenizer.decode(output.tokens[0], skip_special_tokens=True)
        assert len(drafted) == sum(f.accepted > 0 for f in output.rows[0].forwards)
    assert drafted  # the looked-up ones of a text that repeats itself


def test_bytes_that_are_not_utf8_are_named():
    assert read_utf8("hé".encode()) == "hé"
    with pytest.raises(ValueError, match="the standard input is not UTF-8: byte 2 is 0xe9"):
        read_utf8(b"h\xe9")
