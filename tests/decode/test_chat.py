import pytest
import tiny_chat

import draftwood as dw
from draftwood.decode.chat import chat


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
    messages = chat(target, None, reader("hé", "", "you"), tiny_chat.Recorder(), lines.append, max_new_tokens=6)
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
    messages = chat(target, None, turns, tiny_chat.Recorder(), lambda _: None, system="s", max_new_tokens=2)
    assert [(m["role"], m["content"]) for m in messages[:2]] == [("system", "s"), ("user", "b")] and len(messages) == 3


def test_ctrl_c_stops_an_answer_which_stays_in_the_conversation_and_drops_a_line(target):
    screen, lines = tiny_chat.Recorder(stop_after=4), []
    settings = dict(max_new_tokens=30, eos_token_ids=[])
    messages = chat(target, None, reader("hé", KeyboardInterrupt), screen, lines.append, **settings)
    assert messages[1]["content"] == screen.text and lines[0].endswith("(interrupted)")
    assert len(messages) == 2


def test_a_turn_without_room_is_left_out_and_the_conversation_goes_on(target):
    lines = []
    messages = chat(target, None, reader("a", "b" * 2048, "c"), tiny_chat.Recorder(), lines.append, max_new_tokens=2)
    assert [m["content"] for m in messages[::2]] == ["a", "c"]
    assert "left out: the prompt has 20" in lines[1] and "positions for 2048" in lines[1] and "/reset" in lines[1]
