"""Reading conversations: a damaged row costs itself, never the file, and odd turns follow the stated policy."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.train import conversations
from draftwood.train.conversations import RowError, parse_turns, read_rows
from draftwood.train.turns import TurnPolicy, normalise_turns


def conversation(number: int, text: str = 'he said "hi" {[,]}\n', **extra) -> dict:
    turns = [{"from": "human", "value": f"question {number}"}, {"from": "gpt", "value": text}]
    return {"id": f"id{number}", "conversations": turns, **extra}


def write(folder, text: str, name: str = "data.json"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def outcomes(path) -> list:
    return [row.value["id"] if row.error is None else row.error.reason for row in read_rows(path)]


@pytest.fixture(params=[5, 64, 1 << 20], ids="block{}".format)
def block(request, monkeypatch):
    """Rows that span blocks, blocks that span rows."""
    monkeypatch.setattr(conversations, "BLOCK_CHARS", request.param)


@pytest.mark.parametrize("indent", [None, 2])
def test_array_rows_and_their_lines_are_those_of_the_json_module(tmp_path, block, indent):
    rows = [conversation(i, id=i if i % 2 else f"id{i}") for i in range(5)]
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    read = list(read_rows(write(tmp_path, "\ufeff \n" + text + "\n")))
    assert [row.value for row in read] == rows
    assert [row.number for row in read] == [1, 2, 3, 4, 5]
    starts = [i for i, line in enumerate(("\n" + text).split("\n"), start=1) if line == "  {"] if indent else [2] * 5
    assert [row.line for row in read] == starts


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_cut_off_anywhere_yields_every_whole_row_and_reports_the_tail(tmp_path, monkeypatch, indent):
    monkeypatch.setattr(conversations, "BLOCK_CHARS", 50)
    rows = [conversation(i) for i in range(3)]
    text = json.dumps(rows, indent=indent)
    ends = [text.index(f'"id{i}"') + len(json.dumps(rows[i], indent=indent).replace("\n", "\n" + " " * (indent or 0)))
            for i in range(3)]  # fmt: skip
    ends = [text.rindex("}", 0, end + 4) + 1 for end in ends]
    for cut in range(1, len(text)):
        read = list(read_rows(write(tmp_path, text[:cut])))
        whole = [row.value for row in read if row.error is None]
        assert whole == rows[: sum(end <= cut for end in ends)], cut
        assert read[-1].error is not None and read[-1].error.reason == "cut_off"
        assert len(read) == len(whole) + 1


DAMAGE = {
    "a comma too many": lambda text: text.replace('"gpt"}', '"gpt",}'),
    "a quote missing": lambda text: text.replace('"human"', '"human', 1),
    "a quote too many": lambda text: text.replace("question", 'que"stion', 1),
    "a brace missing": lambda text: text.replace("}", "", 1),
    "a raw line break": lambda text: text.replace("question", "que\nstion", 1),
    "a bad escape": lambda text: text.replace("question", "\\q", 1),
    "no json at all": lambda text: "oops",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("layout", ["lines", "array", "indented array", "one line"])
def test_a_broken_row_costs_only_itself(tmp_path, block, damage, layout):
    rows = [json.dumps(conversation(i), indent=1 if layout == "indented array" else None) for i in range(4)]
    rows[1] = DAMAGE[damage](rows[1].replace('"value": "he', '"from": "gpt"}, {"value": "he'))
    joint = {"lines": "\n", "array": ",\n", "indented array": ",\n", "one line": ", "}[layout]
    text = joint.join(rows) if layout == "lines" else f"[{joint.join(rows)}]"
    read = list(read_rows(write(tmp_path, text)))
    pieces = 2 if layout == "lines" and "\n" in rows[1] else 1
    found = [row.error.reason if row.error else row.value["id"] for row in read]
    assert found == ["id0", *["not_json"] * pieces, "id2", "id3"]
    assert read[1].line == text[: text.index(rows[1])].count("\n") + 1


def test_a_bracket_lost_in_one_row_and_one_too_many_later_do_not_swallow_the_rows_between(tmp_path, block):
    rows = [json.dumps(conversation(i)) for i in range(5)]
    rows[1] = rows[1][:-1]
    rows[3] = rows[3] + "}"
    assert outcomes(write(tmp_path, f"[{', '.join(rows)}]")) == ["id0", "not_json", "id2", "id3", "not_json", "id4"]


def test_lines_with_blank_ones_a_number_and_an_unfinished_last_row_keep_count(tmp_path):
    text = "\n".join(
        [json.dumps(conversation(0)), "", "17", json.dumps(conversation(1)), json.dumps(conversation(2))[:-9]]
    )
    read = list(read_rows(write(tmp_path, text, "data.jsonl")))
    assert [(row.number, row.line, row.error.reason if row.error else "") for row in read] == [
        (1, 1, ""), (2, 3, "not_an_object"), (3, 4, ""), (4, 5, "cut_off"),
    ]  # fmt: skip


def test_text_after_the_array_is_reported(tmp_path):
    assert outcomes(write(tmp_path, json.dumps([conversation(0)]) + " [1]")) == ["id0", "not_json"]


@pytest.mark.parametrize("text", ["", "   \n", "hello", '"text"'])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, text):
    with pytest.raises(ValueError, match=r"data\.json .*expected a JSON array or JSON Lines"):
        list(read_rows(write(tmp_path, text)))


def test_bytes_that_are_no_utf8_cost_only_their_row(tmp_path):
    rows = [json.dumps(conversation(i)).encode() for i in range(3)]
    rows[1] = rows[1].replace(b"question", b"que\xffstion")
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(rows))
    read = list(read_rows(path))
    assert [row.value["id"] for row in read] == ["id0", "id1", "id2"]
    with pytest.raises(RowError, match="not_unicode"):
        parse_turns(read[1].value)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 40))
def test_no_garbage_stops_the_reader(tmp_path_factory, garbage, block_chars):
    path = tmp_path_factory.mktemp("garbage") / "data.json"
    first, last = (json.dumps(conversation(i), indent=1).encode() for i in (0, 1))
    path.write_bytes(b"[" + first + b",\n" + garbage + b"\n,\n" + last + b"\n]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "BLOCK_CHARS", block_chars)
        read = list(read_rows(path))
    assert read[0].value == json.loads(first)
    assert [row.number for row in read] == list(range(1, len(read) + 1))
    assert all((row.value is None) == (row.error is not None) for row in read)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"id": 1}, "no_turns"),
        ({"conversations": None}, "no_turns"),
        ({"conversations": ["hi"]}, "bad_turn"),
        ({"conversations": [{"from": "human"}]}, "bad_turn"),
        ({"conversations": [{"from": None, "value": "hi"}]}, "bad_turn"),
        ({"conversations": [{"from": "human", "value": None}]}, "value_not_text"),
        ({"conversations": [{"from": "human", "value": ["a", "b"]}]}, "value_not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "value_not_text"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "not_unicode"),
        ([1], "not_an_object"),
    ],
)
def test_a_row_of_the_wrong_shape_is_an_error_with_a_reason(row, reason):
    with pytest.raises(RowError) as caught:
        parse_turns(row)
    assert caught.value.reason == reason


def test_both_shapes_of_row_give_the_same_turns():
    sharegpt = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    messages = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    assert normalise_turns(parse_turns(sharegpt), TurnPolicy()) == normalise_turns(parse_turns(messages), TurnPolicy())


def normal(turns: str, **policy) -> tuple[str, dict]:
    """Turns and result in short: one letter of the role, then the text."""
    roles = {"u": "human", "a": "gpt", "s": "system", "b": "bing", "t": "tool"}
    pairs = [(roles[turn[0]], turn[1:]) for turn in turns.split("|") if turn]
    messages, changes = normalise_turns(pairs, TurnPolicy(**policy))
    return "|".join(message["role"][0] + message["content"] for message in messages), dict(changes)


@pytest.mark.parametrize(
    ("turns", "policy", "expected", "changes"),
    [
        ("uq|aa", {}, "uq|aa", {}),
        ("uq|ur|aa", {}, "uq\n\nr|aa", {"same_role_merged": 1}),
        ("uq|aa|ur|us|ab", {"same_role": "cut"}, "uq|aa", {"same_role_cut": 1, "unanswered_turn_dropped": 1}),
        ("uq|aa|ab", {}, "uq|aa\n\nb", {"same_role_merged": 1}),
        ("uq|aa|ab|ur|ac", {"same_role": "cut"}, "uq|aa", {"same_role_cut": 1}),
        ("ax|uq|aa", {}, "uq|aa", {"leading_reply_dropped": 1}),
        ("ss|ax|ay|uq|aa", {}, "ss|uq|aa", {"leading_reply_dropped": 2}),
        ("uq|a |ur|aa", {}, "uq\n\nr|aa", {"blank_turn_dropped": 1, "same_role_merged": 1}),
        ("uq|aa|ur", {}, "uq|aa", {"unanswered_turn_dropped": 1}),
        ("ss|uq|aa", {}, "ss|uq|aa", {}),
        ("ss|uq|aa", {"system": "fold"}, "us\n\nq|aa", {"system_folded": 1}),
        ("ss|uq|aa", {"system": "drop"}, "uq|aa", {"system_dropped": 1}),
        ("uq|aa|ss|ur|ab", {}, "uq|aa|us\n\nr|ab", {"system_folded": 1}),
        ("uq|aa|ss", {}, "uq|aa", {"system_dropped": 1}),
        ("uq|aa|ur|bx|us|ab", {}, "uq|aa", {"unknown_role_cut": 1, "unanswered_turn_dropped": 1}),
        (
            "uq|bx|ur|aa",
            {"unknown_role": "drop_turn"},
            "uq\n\nr|aa",
            {"unknown_role_dropped": 1, "same_role_merged": 1},
        ),
        ("uq|tx|aa", {"unknown_role": "drop_turn"}, "uq|aa", {"unknown_role_dropped": 1}),
    ],
)
def test_odd_turns_follow_the_policy_and_are_counted(turns, policy, expected, changes):
    assert normal(turns, **policy) == (expected, changes)


@pytest.mark.parametrize(
    ("turns", "policy", "reason"),
    [
        ("", {}, "empty"),
        ("u |a\n", {}, "no_reply"),
        ("uq", {}, "no_reply"),
        ("ss", {}, "no_reply"),
        ("aa", {}, "no_reply"),
        ("uq|bx", {}, "no_reply"),
        ("uq|aa|bx", {"unknown_role": "drop_row"}, "unknown_role"),
    ],
)
def test_a_conversation_that_can_not_be_used_is_dropped_with_its_reason(turns, policy, reason):
    with pytest.raises(RowError) as caught:
        normal(turns, **policy)
    assert caught.value.reason == reason


TURNS = st.lists(
    st.tuples(st.sampled_from(["human", "gpt", "system", "bing", "tool", "GPT"]), st.text("xy \n", max_size=3))
)


@given(
    TURNS,
    st.sampled_from(["cut", "drop_turn", "drop_row"]),
    st.sampled_from(["merge", "cut"]),
    st.sampled_from(["keep", "fold", "drop"]),
)
def test_whatever_comes_in_alternates_and_no_unknown_role_speaks_as_the_assistant(turns, unknown, same, system):
    marked = [(role, f"<{role.lower()}>{text}" if text.strip() else text) for role, text in turns]
    policy = TurnPolicy(unknown_role=unknown, same_role=same, system=system)
    try:
        messages, _ = normalise_turns(marked, policy)
    except RowError:
        return
    roles = [message["role"] for message in messages]
    if roles[0] == "system":
        assert system == "keep"
        roles = roles[1:]
    assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
    for message in messages:
        text = message["content"]
        assert "<bing>" not in text and "<tool>" not in text
        assert ("<gpt>" in text) == (message["role"] == "assistant")


def test_a_misspelt_policy_is_refused():
    with pytest.raises(ValueError, match="unknown_role is 'split', expected one of 'cut'"):
        TurnPolicy(unknown_role="split")
    with pytest.raises(ValueError, match="'gpt' is listed twice"):
        TurnPolicy(user_roles=("gpt",))
