import pytest
import tiny_chat
from transformers import AutoModelForCausalLM

import draftwood as dw
from draftwood.decode.console import answer


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return dw.load_target(str(tiny_chat.save(tmp_path_factory.mktemp("target"))), dtype="float32")


def test_pieces_are_the_text_of_the_output(target):
    pieces = []
    output, summary = answer(target, None, "hé", pieces.append, max_new_tokens=12)
    assert "".join(pieces) == target.tokenizer.decode(output.tokens[0], skip_special_tokens=True)
    assert f"{len(output.tokens[0])} tokens" in summary and "acceptance length 1.00" in summary


def test_ctrl_c_keeps_what_was_written(target):
    pieces = []

    def write(piece):
        pieces.append(piece)
        if len(pieces) == 4:
            raise KeyboardInterrupt

    whole, _ = answer(target, None, "hé", lambda _: None, max_new_tokens=30, eos_token_ids=[])
    output, summary = answer(target, None, "hé", write, max_new_tokens=30, eos_token_ids=[])
    assert output.tokens[0] == whole.tokens[0][:4] and summary.endswith("(interrupted)")


def test_a_target_without_tokenizer_is_refused_by_name(target):
    bare = dw.load_target(AutoModelForCausalLM.from_config(target.config))
    with pytest.raises(ValueError, match="has no tokenizer"):
        answer(bare, None, "x", print)
