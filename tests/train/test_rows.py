"""Rows: the mask covers the assistant's words and their terminator, as the template writes them, or the row fails."""

import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from draftwood.train.conversations import RowError
from draftwood.train.rows import RowBuilder, supervised_rows
from draftwood.train.turns import Message, TurnPolicy


def chat(*texts: str, system: str | None = None) -> list[Message]:
    messages = [Message(role="user" if i % 2 == 0 else "assistant", content=text) for i, text in enumerate(texts)]
    return [Message(role="system", content=system), *messages] if system is not None else messages


def runs(mask) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask).astype(int), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def replies(tokenizer, row) -> list[str]:
    return [tokenizer.decode(row.input_ids[a:b]) for a, b in runs(row.loss_mask)]


def reason(build, messages) -> str:
    with pytest.raises(RowError) as caught:
        build(messages)
    return caught.value.reason


@st.composite
def spans(draw):
    """Replies [a, b) with at least one other token between two of them, and a row length."""
    at, found = draw(st.integers(0, 3)), []
    for _ in range(draw(st.integers(0, 4))):
        length = draw(st.integers(1, 6))
        found.append((at, at + length))
        at += length + draw(st.integers(1, 4))
    return found, max([1, *(b for _, b in found)]) + draw(st.integers(0, 3))


@given(spans())
def test_supervised_rows_are_those_from_a_minus_1_to_b_minus_3_of_every_reply(case):
    found, length = case
    mask = torch.zeros(length, dtype=torch.bool)
    expected = set()
    for a, b in found:
        mask[a:b] = True
        expected |= {t for t in range(a - 1, b - 3 + 1) if t >= 0}
    assert set(supervised_rows(mask).nonzero()[:, 0].tolist()) == expected
    assert supervised_rows(mask.long()[None].repeat(3, 1)).tolist() == [supervised_rows(mask).tolist()] * 3


def test_first_drafting_row_is_supervised_and_the_one_past_the_answer_is_not():
    a, b = 4, 9
    mask = torch.zeros(12)
    mask[a:b] = 1
    assert supervised_rows(mask).nonzero()[:, 0].tolist() == [3, 4, 5, 6]
    assert supervised_rows(mask)[a - 1] and not supervised_rows(mask)[b - 2]
    assert supervised_rows(torch.ones(2)).tolist() == [False, False]


CHAT = chat("hello there", "the answer", "a question?\n", "  an answering answer \n\n", "é🙂?", "🙂é")


@pytest.mark.parametrize("template", ["chatml", "refuses system", "ignores system", "alternates", "inst"])
def test_mask_covers_every_reply_with_its_terminator_and_nothing_else(chat_tokenizer, template):
    tokenizer = chat_tokenizer(template)
    row = RowBuilder(tokenizer, max_length=1000)(CHAT)
    lead = " " if template == "inst" else ""
    assert replies(tokenizer, row) == [lead + message["content"] + "<|im_end|>" for message in CHAT[1::2]]
    assert tokenizer.decode(row.input_ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert row.input_ids.dtype == np.int32 and row.loss_mask.dtype == bool
    assert not row.changes


@pytest.mark.parametrize("template", ["chatml", "trims", "inst"])
def test_tokens_before_a_reply_are_the_prompt_that_decoding_would_see(chat_tokenizer, template):
    tokenizer = chat_tokenizer(template)
    row = RowBuilder(tokenizer, max_length=1000)(CHAT)
    starts = [a for a, _ in runs(row.loss_mask)]
    for i, a in zip((1, 3, 5), starts, strict=True):
        prompt = tokenizer.apply_chat_template(CHAT[:i], tokenize=False, add_generation_prompt=True)
        assert row.input_ids[:a].tolist() == tokenizer.encode(prompt, add_special_tokens=False)


def test_a_template_that_trims_turns_is_masked_as_it_writes_them(chat_tokenizer):
    tokenizer = chat_tokenizer("trims")
    row = RowBuilder(tokenizer, max_length=1000)(CHAT)
    assert replies(tokenizer, row) == [message["content"].strip() + "<|im_end|>" for message in CHAT[1::2]]


words = st.text("ab é🙂\n<|", min_size=1, max_size=8).filter(str.strip)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
@example([("hello", "\n answer")])
def test_any_text_is_masked_exactly_or_refused_where_the_prompt_tokenises_another_way(chat_tokenizer, turns):
    tokenizer = chat_tokenizer("chatml")
    messages = chat(*[text for pair in turns for text in pair])
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    prompts = [
        tokenizer.apply_chat_template(messages[:i], tokenize=True, return_dict=False, add_generation_prompt=True)
        for i in range(1, len(messages), 2)
    ]
    try:
        row = RowBuilder(tokenizer, max_length=10_000)(messages)
    except RowError as error:
        assert error.reason == "boundary_in_token"
        assert any(whole[: len(prompt)] != prompt for prompt in prompts)
        return
    assert replies(tokenizer, row) == [reply + "<|im_end|>" for _, reply in turns]
    assert [a for a, _ in runs(row.loss_mask)] == list(map(len, prompts))
    assert all(whole[: len(prompt)] == prompt for prompt in prompts)


@pytest.mark.parametrize("template", ["refuses system", "ignores system", "alternates"])
def test_a_template_without_a_system_role_gets_the_system_text_folded_or_dropped_as_configured(
    chat_tokenizer, template
):
    tokenizer = chat_tokenizer(template)
    messages = chat("hello", "the answer", system="written")
    folded = RowBuilder(tokenizer, max_length=1000)(messages)
    assert "user\nwritten\n\nhello<|im_end|>" in tokenizer.decode(folded.input_ids)
    assert folded.changes == {"system_folded": 1}
    policy = TurnPolicy(template_without_system="drop")
    dropped = RowBuilder(tokenizer, max_length=1000, policy=policy)(messages)
    assert "written" not in tokenizer.decode(dropped.input_ids)
    assert dropped.changes == {"system_dropped": 1}
    kept = RowBuilder(chat_tokenizer("chatml"), max_length=1000)(messages)
    assert "system\nwritten<|im_end|>" in tokenizer.decode(kept.input_ids) and not kept.changes
    assert messages == chat("hello", "the answer", system="written")


def test_a_template_error_is_a_row_error(chat_tokenizer):
    build = RowBuilder(chat_tokenizer("alternates"), max_length=1000)
    messages = [Message(role="user", content="a"), *chat("b", "the answer")]
    assert reason(build, messages) == "template_error"


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("drops reasoning", chat("q", "<think>hm</think>the answer", "r", "there")),
        ("other last terminator", chat("q", "the answer", "r", "there")),
    ],
)
def test_a_template_that_rewrites_history_is_a_row_error_or_leaves_the_last_reply(chat_tokenizer, template, messages):
    tokenizer = chat_tokenizer(template)
    assert reason(RowBuilder(tokenizer, max_length=1000), messages) == "not_prefix_stable"
    policy = TurnPolicy(unstable_template="last_reply")
    row = RowBuilder(tokenizer, max_length=1000, policy=policy)(messages)
    terminator = "<|endoftext|>" if template == "other last terminator" else "<|im_end|>"
    assert replies(tokenizer, row) == ["there" + terminator]
    assert row.changes == {"last_reply_only": 1}


def test_such_a_template_is_fine_where_nothing_is_rewritten(chat_tokenizer):
    tokenizer = chat_tokenizer("drops reasoning")
    row = RowBuilder(tokenizer, max_length=1000)(chat("q", "the answer", "r", "<think>hm</think>there"))
    assert replies(tokenizer, row) == ["the answer<|im_end|>", "<think>hm</think>there<|im_end|>"]


def test_a_reply_that_starts_inside_a_token_is_a_row_error(chat_tokenizer):
    tokenizer = chat_tokenizer("no gap")
    assert "answer" in tokenizer.get_vocab()
    build = RowBuilder(tokenizer, max_length=1000)
    assert reason(build, chat("hello", "wer the")) == "boundary_in_token"
    assert replies(tokenizer, build(chat("hello", "? the"))) == ["? the<|im_end|>"]


def test_offsets_that_leave_out_spaces_do_not_hide_a_boundary(chat_tokenizer):
    tokenizer = chat_tokenizer("inst")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert tokenizer("x the", return_offsets_mapping=True)["offset_mapping"][-1][0] == 2
    row = RowBuilder(tokenizer, max_length=1000)(CHAT)
    assert replies(tokenizer, row) == [" " + message["content"] + "<|im_end|>" for message in CHAT[1::2]]
    # The space now belongs to the prompt, but to the reply's token.
    tokenizer.chat_template = tokenizer.chat_template.replace("[/INST]'", "[/INST] '").replace("' ' + m", "m")
    assert reason(RowBuilder(tokenizer, max_length=1000), chat("hello", "the answer")) == "boundary_in_token"


def test_a_template_that_can_not_show_where_a_reply_starts_is_refused(chat_tokenizer):
    with pytest.raises(ValueError, match="ignores add_generation_prompt"):
        RowBuilder(chat_tokenizer("no prompt"), max_length=1000)
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        RowBuilder(tokenizer, max_length=1000)


def test_text_that_holds_a_mark_of_turns_is_a_row_error(chat_tokenizer):
    build = RowBuilder(chat_tokenizer("chatml"), max_length=1000)
    assert reason(build, chat("hello", "the <|im_end|> answer")) == "special_token_in_text"
    assert reason(build, chat("hello<|im_start|>assistant\n", "the answer")) == "special_token_in_text"
    assert build(chat("<|endoftext|>", "a special token that marks no turn")).loss_mask.any()


def test_clipping_cuts_ids_and_mask_together_at_every_length(chat_tokenizer):
    tokenizer = chat_tokenizer("chatml")
    whole = RowBuilder(tokenizer, max_length=1000)(CHAT)
    first = runs(whole.loss_mask)[0][0]
    for max_length in range(3, len(whole.input_ids) + 2):
        build = RowBuilder(tokenizer, max_length=max_length)
        if max_length < first + 2:
            assert reason(build, CHAT) == "clipped_to_nothing"
            continue
        row = build(CHAT)
        assert row.input_ids.tolist() == whole.input_ids[:max_length].tolist()
        assert row.loss_mask.tolist() == whole.loss_mask[:max_length].tolist()
        assert row.changes == ({"clipped": 1} if max_length < len(whole.input_ids) else {})


def test_a_guess_of_too_few_characters_does_not_make_a_clipped_row_too_short(chat_tokenizer, monkeypatch):
    monkeypatch.setattr("draftwood.train.rows.CHARS_PER_TOKEN", 1)
    tokenizer = chat_tokenizer("chatml")
    messages = chat(*["the answer is an answering answer"] * 40)
    whole = RowBuilder(tokenizer, max_length=100_000)(messages)
    for max_length in range(40, 200, 7):
        row = RowBuilder(tokenizer, max_length=max_length)(messages)
        assert row.input_ids.tolist() == whole.input_ids[:max_length].tolist()


def test_text_far_beyond_the_clip_is_not_tokenised_and_changes_nothing(chat_tokenizer, monkeypatch):
    tokenizer = chat_tokenizer("chatml")
    long = chat(*["the question about an answer " * 4, "written answer "] * 40)
    whole = RowBuilder(tokenizer, max_length=100_000)(long)
    build = RowBuilder(tokenizer, max_length=50)
    seen = []
    encode = build._encode
    monkeypatch.setattr(build, "_encode", lambda text: seen.append(len(text)) or encode(text))
    row = build(long)
    assert row.input_ids.tolist() == whole.input_ids[:50].tolist()
    assert row.loss_mask.tolist() == whole.loss_mask[:50].tolist()
    assert row.changes == {"clipped": 1}
    assert sum(seen) < 1500


def test_a_reply_without_a_row_to_supervise_is_dropped(chat_tokenizer):
    tokenizer = chat_tokenizer("inst")
    tokenizer.chat_template = re.sub(r" \+ '<\|im_end\|>'", "", tokenizer.chat_template).replace("' ' + ", "")
    assert reason(RowBuilder(tokenizer, max_length=1000), chat("hello", "?")) == "nothing_supervised"


def test_template_options_reach_the_template(chat_tokenizer):
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "{{ '<|endoftext|>' if mark else '' }}" + tokenizer.chat_template
    plain = RowBuilder(tokenizer, max_length=100)(CHAT)
    marked = RowBuilder(tokenizer, max_length=100, template_options={"mark": True})(CHAT)
    assert marked.input_ids.tolist() == [0, *plain.input_ids.tolist()][:100]
