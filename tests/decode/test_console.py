import pytest
import tiny_chat
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor

import draftwood as dw
from draftwood.decode.console import answer
from draftwood.decode.rehearsal import SCRIPT, Rehearsal
from draftwood.decode.text import read_utf8


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return dw.load_target(str(tiny_chat.save(tmp_path_factory.mktemp("target"))), dtype="float32")


class LettersOnly(LogitsProcessor):
    """Every token is one ASCII letter, so that each character is one token's."""

    def __init__(self, tokenizer):
        self.others = torch.ones(259, dtype=torch.bool)
        self.others[tokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")["input_ids"]] = False

    def __call__(self, input_ids, scores):
        return scores.masked_fill(self.others, float("-inf"))


def test_pieces_are_the_text_of_the_output(target):
    screen = tiny_chat.Recorder()
    reply = answer(target, None, "hé", screen, max_new_tokens=12)
    assert screen.text == reply.text == target.tokenizer.decode(reply.output.tokens[0], skip_special_tokens=True)
    assert f"{len(reply.output.tokens[0])} tokens" in reply.summary and "acceptance length 1.00" in reply.summary
    assert len(screen.statuses) == 1 + reply.output.steps and "1.00 tokens per step" in screen.statuses[-1]


def test_ctrl_c_keeps_what_was_written(target):
    whole = answer(target, None, "hé", tiny_chat.Recorder(), max_new_tokens=30, eos_token_ids=[])
    screen = tiny_chat.Recorder(stop_after=4)
    reply = answer(target, None, "hé", screen, max_new_tokens=30, eos_token_ids=[])
    assert reply.output.tokens[0] == whole.output.tokens[0][: len(reply.output.tokens[0])]
    assert whole.text.startswith(screen.text[:3]) and len(screen.pieces) in (4, 5)
    assert reply.is_interrupted and reply.summary.endswith("(interrupted)")


def test_exactly_the_accepted_drafts_are_marked(target):
    """By a draft whose script says how many of its tokens are right; transformers says what the text is."""
    encoded = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hé"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids, only = encoded["input_ids"], LettersOnly(target.tokenizer)
    text = target.model.generate(ids, max_new_tokens=40, do_sample=False, logits_processor=[only])[0, ids.shape[1] :]
    screen = tiny_chat.Recorder()
    draft = Rehearsal([text.tolist()], 259)
    reply = answer(target, draft, "hé", screen, max_new_tokens=32, logits_processor=only)
    assert reply.text == target.tokenizer.decode(text[:32]) and len(reply.text) == 32
    expected = [False]  # from the prompt
    for step in range(32):
        turn, has_none = divmod(step, 2)
        expected += [True] * (0 if has_none else SCRIPT[turn % len(SCRIPT)]) + [False]
    assert [is_draft for piece, is_draft in screen.pieces for _ in piece] == expected[:32]


def test_accepted_drafts_before_half_a_character_are_marked_too(target):
    class Tokens(Rehearsal):
        def _row(self, b, accepted):
            return super()._row(b, len(self.texts[b]))

    text = target.tokenizer("ab\N{GREEK SMALL LETTER ALPHA}c")["input_ids"]  # five bytes: a, b, two of alpha, c

    class Follow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            done = input_ids.shape[1] - length
            forced = torch.full_like(scores, float("-inf"))
            forced[:, text[min(done, len(text) - 1)]] = 0
            return forced

    encoded = target.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)
    length = len(encoded["input_ids"])
    screen = tiny_chat.Recorder()
    # Its first step has three right drafts: b and both halves of the character, or b and the first half of it.
    for drafts, marked in ((text, [False, True, True, False]), ([*text[:3], 5, 5], [False, True, False, False])):
        screen = tiny_chat.Recorder()
        answer(target, Rehearsal([drafts], 259), "x", screen, max_new_tokens=5, logits_processor=Follow())
        assert screen.text == "abαc" and [is_draft for _, is_draft in screen.pieces] == marked


def test_a_target_without_tokenizer_a_blank_and_a_too_long_prompt_are_refused_by_name(target):
    bare = dw.load_target(AutoModelForCausalLM.from_config(target.config))
    with pytest.raises(ValueError, match="has no tokenizer"):
        answer(bare, None, "x", tiny_chat.Recorder())
    with pytest.raises(ValueError, match="user's text is not UTF-8: character 2 is '.udce9'"):
        answer(target, None, "h\udce9", tiny_chat.Recorder())
    with pytest.raises(ValueError, match="the prompt is blank"):
        answer(target, None, " \n", tiny_chat.Recorder())
    with pytest.raises(ValueError, match=r"the prompt has 20\d\d tokens .* positions for 2048 in all"):
        answer(target, None, "x" * 2000, tiny_chat.Recorder(), max_new_tokens=60)


def test_bytes_that_are_not_utf8_are_named():
    assert read_utf8("hé".encode()) == "hé"
    with pytest.raises(ValueError, match="the standard input is not UTF-8: byte 2 is 0xe9"):
        read_utf8(b"h\xe9")
