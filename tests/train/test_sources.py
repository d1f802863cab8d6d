"""Sources: one conversation comes out alike from every kind of file, and weights, repeats and duplicates add up."""

import json
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from draftwood.configs.load import ConfigError, load_config
from draftwood.configs.schema import SourceConfig
from draftwood.train.prepare import _conversations, load_rows, prepare
from draftwood.train.report import RowAccount, SourceAccount
from draftwood.train.report_page import PAGE_FILE
from draftwood.train.sources import Source, copies, open_sources
from draftwood.train.turns import TurnPolicy

QUIET = Console(quiet=True)


def row(i, question: str = "question", **extra) -> dict:
    turns = [{"from": "human", "value": f"{question} {i}"}, {"from": "gpt", "value": f"the answer {i}"}]
    return {"id": f"id{i}", "conversations": turns, **extra}


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


ROWS = [row(i) for i in range(40)]
KINDS = {
    "lines": lambda folder: write_lines(folder / "rows.jsonl", ROWS),
    "array": lambda folder: _written(folder / "rows.json", json.dumps(ROWS)),
    "parquet": lambda folder: _parquet(folder / "rows.parquet", ROWS),
    "parquet of another name": lambda folder: _parquet(folder / "rows", ROWS),
    "data set": lambda folder: _saved(Dataset.from_list(ROWS), folder / "saved"),
    "its only split": lambda folder: _saved(DatasetDict({"all": Dataset.from_list(ROWS)}), folder / "saved"),
    "its training split": lambda folder: _saved(
        DatasetDict({"test": Dataset.from_list(ROWS[:3]), "train": Dataset.from_list(ROWS)}), folder / "saved"
    ),
    "messages": lambda folder: write_lines(
        folder / "rows.jsonl",
        [
            {"id": one["id"], "messages": [{"role": t["from"], "content": t["value"]} for t in one["conversations"]]}
            for one in ROWS
        ],
    ),
}


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _parquet(path: Path, rows: list) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def _saved(data: Dataset | DatasetDict, path: Path) -> Path:
    data.save_to_disk(str(path))
    return path


@pytest.fixture
def run(chat_tokenizer, tmp_path):
    def run(source, out="out", **options):
        options = {"max_length": 60, "num_validation": 4, "seed": 0, "console": QUIET, **options}
        return prepare(source, chat_tokenizer(), tmp_path / out, **options)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_come_out_of_every_kind_of_source(kind, run, tmp_path):
    source = KINDS[kind](tmp_path)
    run(write_lines(tmp_path / "plain.jsonl", ROWS), "plain")
    account = run(str(source), "other")
    assert account.num_rows == account.num_kept == 40
    columns = ["input_ids", "loss_mask", "source_row", "source_id", "prompt"]
    for split in ("train", "validation"):
        rows = [load_rows(tmp_path / out, split).select_columns(columns).to_list() for out in ("plain", "other")]
        assert rows[0] == rows[1]


def test_a_table_with_rows_of_both_shapes_and_odd_values_drops_only_what_is_wrong(run, tmp_path):
    turn = pa.struct([("from", pa.string()), ("value", pa.string()), ("role", pa.string()), ("content", pa.string())])
    schema = pa.schema([("id", pa.int64()), ("conversations", pa.list_(turn)), ("messages", pa.list_(turn))])
    old = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "the answer"}]
    new = [{"role": "user", "content": "r"}, {"role": "assistant", "content": "the answer"}]
    rows = [
        {"id": 1, "conversations": old},
        {"id": None, "messages": new},
        {"id": 3},
        {"id": 4, "conversations": [None]},
        {"id": 5, "conversations": []},
        {"id": 6, "messages": [{"role": "user", "content": None}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "rows.parquet")
    (own,) = run(tmp_path / "rows.parquet", num_validation=1).sources
    assert {reason: entry.rows for reason, entry in own.dropped.items()} == {
        "no_turns": [3], "bad_turn": [4], "empty": [5], "value_not_text": [6],
    }  # fmt: skip
    assert own.num_kept == 2 and own.dropped["no_turns"].example.startswith("row 3: ")


def test_text_of_a_table_that_is_no_utf8_costs_only_its_row(run, tmp_path):
    table = pa.Table.from_pylist(ROWS[:9])
    parts = [pa.array([b"\xff\xfe" if i == 4 else b"id" for i in range(9)]).view(pa.string()), table["conversations"]]
    pq.write_table(pa.Table.from_arrays(parts, ["id", "conversations"]), tmp_path / "rows.parquet")
    (own,) = run(tmp_path / "rows.parquet", num_validation=1).sources
    assert own.num_kept == 8 and own.dropped["not_unicode"].rows == [5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: f / "nothere.jsonl", r"nothere.jsonl: no such file or folder; a source is a file, .* hub id"),
        (lambda f: _parquet(f / "a.parquet", [{"text": "x", "n": 1}]), r"a.parquet has no column .*are text, n"),
        (lambda f: _written(f / "a.parquet", "PAR1 and no more"), r"a.parquet is no whole Parquet file"),
        (lambda f: _written(f / "a.parquet", ""), r"a.parquet is no whole Parquet file"),
        (lambda f: _saved(Dataset.from_list([{"text": "x"}]), f / "a"), r"a has no column .* its columns are text"),
        (lambda f: _saved(DatasetDict({k: Dataset.from_list(ROWS) for k in ("x", "y")}), f / "a"),
         r"a has no split 'train' but x, y; name one as .*a#x"),
        (lambda f: f"{_saved(Dataset.from_list(ROWS), f / 'a')}#test", r"a: one data set without splits; leave #test"),
        (lambda f: f"{KINDS['lines'](f)}#test", r"rows.jsonl is a file and has no splits; leave #test out"),
        (lambda f: f, r"datasets can't load this folder: "),
        (lambda f: f"{KINDS['lines'](f)}:abc", r"rows.jsonl:abc: the weight 'abc' is not a number above 0"),
    ],
)  # fmt: skip
def test_a_source_that_holds_no_rows_is_one_line_that_names_it(make, message, run, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        run(str(make(tmp_path)))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_damaged_table_is_one_line_that_names_it(tmp_path):
    whole = _parquet(tmp_path / "rows.parquet", ROWS).read_bytes()
    saved = _saved(Dataset.from_list(ROWS), tmp_path / "saved")
    arrow = next(saved.glob("*.arrow"))
    random = Random(0)
    for number in range(6):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[random.randrange(4, len(whole) - 300)] ^= 0xFF
        (tmp_path / "rows.parquet").write_bytes(damaged if number else whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=r"^[^\n]*rows.parquet [^\n]*$"):
            list(Source(SourceConfig(path=str(tmp_path / "rows.parquet"))).rows())
    arrow.write_bytes(arrow.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"^[^\n]*saved: datasets can't load this folder: [^\n]*$"):
        list(Source(SourceConfig(path=str(saved))).rows())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sharegpt", ("sharegpt", None, 1.0)),
        ("a/b.jsonl:0.25", ("a/b.jsonl", None, 0.25)),
        ("owner/name#test_sft:2", ("owner/name", "test_sft", 2.0)),
        ("C:\\rows.json", ("C:\\rows.json", None, 1.0)),
    ],
)
def test_a_source_is_written_as_path_split_and_weight(text, expected):
    parsed = SourceConfig.parse(text)
    assert (parsed.path, parsed.split, parsed.weight) == expected
    assert load_config(None, [f"data.source='{text}'"]).data.source == (parsed,)


def test_the_configuration_takes_one_source_or_several_and_names_a_wrong_one():
    several = load_config(None, ["data.source=[a.jsonl, {path: b.parquet, weight: 0.5}, c:3]"]).data.source
    assert [(one.path, one.weight) for one in several] == [("a.jsonl", 1), ("b.parquet", 0.5), ("c", 3)]
    for wrong, message in [
        ("a:0", "a weight above 0"), ("a:-1", "a weight above 0"), (":2", "expected path"), ("[]", "at least 1"),
        ("{path: a, wait: 1}", "wait"), ("{weight: 1}", "path"), ("[3]", "source"), ("a:1e999", "expected path"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            load_config(None, [f"data.source={wrong}"])


def test_weights_use_a_share_by_hash_and_repeat_above_one(run, tmp_path):
    first = write_lines(tmp_path / "first.jsonl", [row(i, "first") for i in range(60)])
    second = write_lines(tmp_path / "second.jsonl", [row(i, "second") for i in range(20)])
    account = run([f"{first}:0.5", f"{second}:2.5"], num_validation=6)
    part, twice = account.sources
    assert part.num_rows == 60 and part.num_kept + len(part.dropped["not_sampled"].rows) == 60
    assert 18 <= part.num_kept <= 42 and not any(split.repeats for split in part.splits.values())
    assert twice.num_kept == 20 and set(twice.dropped) == set()
    train, held_out = (load_rows(tmp_path / "out", split) for split in ("train", "validation"))
    assert len(held_out) == 6 == len(set(map(str, held_out["prompt"])))
    assert len(train) == account.splits["train"].rows
    times = [sum(r["source_row"] == i and r["source"] == "second.jsonl" for r in train) for i in range(1, 21)]
    assert set(times) == {0, 2, 3} and times.count(0) == twice.splits["validation"].rows
    assert sum(times) - sum(t > 0 for t in times) == twice.splits["train"].repeats
    assert account.splits["train"].tokens == sum(map(len, train["input_ids"]))
    assert set(map(str, train["prompt"])).isdisjoint(map(str, held_out["prompt"]))


@given(st.text(max_size=20), st.floats(0.01, 4), st.floats(0.01, 4), st.integers(0, 5))
def test_a_higher_weight_keeps_what_a_lower_one_uses(digest, one, other, seed):
    low, high = sorted((one, other))
    assert copies(digest, low, seed) <= copies(digest, high, seed)
    assert int(low) <= copies(digest, low, seed) <= int(low) + 1
    assert copies(digest, 3.0, seed) == 3


def test_weights_draw_that_share():
    used = sum(copies(str(i), 1.25, 0) for i in range(4000))
    assert abs(used - 5000) < 120


def test_a_conversation_of_an_earlier_source_is_a_duplicate_unless_that_one_left_it_out(run, tmp_path):
    first = write_lines(tmp_path / "first.jsonl", ROWS)
    second = write_lines(tmp_path / "second.jsonl", [{**one, "id": "other"} for one in ROWS])
    whole = run([str(first), str(second)], "whole")
    assert whole.sources[1].dropped["duplicate"].rows == list(range(1, 41))
    assert "the same as row 1 of first.jsonl" in whole.sources[1].dropped["duplicate"].example
    part = run([f"{first}:0.5", str(second)], "part")
    assert part.num_kept == 40 and part.sources[1].num_kept == len(part.sources[0].dropped["not_sampled"].rows)


def test_training_rows_of_several_sources_are_mixed_and_do_not_depend_on_their_order(run, tmp_path):
    paths = [write_lines(tmp_path / f"{name}.jsonl", [row(i, name) for i in range(50)]) for name in ("first", "second")]
    run(paths, "one")
    run(paths[::-1], "other")
    one, other = (load_rows(tmp_path / out, "train") for out in ("one", "other"))
    assert one["input_ids"] == other["input_ids"]
    assert 8 < [name for name in one["source"]][:48].count("first.jsonl") < 40


def test_another_weight_or_source_is_other_data_and_overwrite_replaces_it(run, tmp_path):
    first, second = (write_lines(tmp_path / f"{n}.jsonl", [row(i, n) for i in range(20)]) for n in ("a", "b"))
    run([first, second])
    assert run([first, second]).num_rows == 40
    for changed in ([first], [second, first], [first, f"{second}:0.5"]):
        with pytest.raises(ValueError, match="another source_sha256: .*--overwrite .*overwrite=True"):
            run(changed)
    with pytest.raises(ValueError, match="another min_length"):
        run([first, second], min_length=3)
    assert run([first], overwrite=True).num_rows == 20


def test_one_source_given_twice_is_refused_and_equal_names_are_told_apart(tmp_path):
    paths = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        paths.append(str(write_lines(tmp_path / name / "rows.jsonl", ROWS)))
    assert [source.name for source in open_sources(paths)] == paths
    with pytest.raises(ValueError, match=r"rows.jsonl is given twice; .* rows.jsonl:2|given twice"):
        open_sources([paths[0], f"{paths[0]}:2"])
    with pytest.raises(ValueError, match="no source"):
        open_sources([])


def test_rows_outside_the_lengths_are_dropped_and_counted(run, tmp_path):
    rows = [row("s"), row("m", "question " * 3), row("l", "question " * 90), row("n")]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    (own,) = run(path, min_length=25, long_rows="drop", max_length=50, num_validation=0).sources
    lengths = [len(ids) for ids in load_rows(tmp_path / "out", "train")["input_ids"]]
    assert all(25 <= n <= 50 for n in lengths) and own.num_kept == len(lengths) > 0
    assert own.dropped["too_long"].rows == [3]
    with pytest.raises(ValueError, match="min_length is 61, above max_length"):
        run(path, "no", min_length=61)
    with pytest.raises(ValueError, match="long_rows is 'cut'"):
        run(path, "no", long_rows="cut")


def test_no_language_is_treated_apart(run, chat_tokenizer, tmp_path):
    texts = ["今天天气怎么样", "مرحبا كيف حالك", "Straße 🙂 é e\u0301", "नमस्ते दुनिया", "שלום עולם"]
    path = write_lines(tmp_path / "rows.jsonl", [row(i, text) for i, text in enumerate(texts)])
    account = run(path, max_length=400, num_validation=0)
    assert account.num_kept == 5
    for ids, text in zip(load_rows(tmp_path / "out", "train")["input_ids"], texts, strict=True):
        assert text in chat_tokenizer().decode(ids)


def test_the_page_has_the_account_the_histograms_and_escaped_rows_and_needs_no_other_file(run, tmp_path):
    rows = [row(i, "is 1 < 2 & <b>?") for i in range(12)] + [{"id": 1}]
    account = run(write_lines(tmp_path / "<rows>.jsonl", rows))
    page = (tmp_path / "out" / PAGE_FILE).read_text(encoding="utf-8")
    assert "&lt;rows&gt;.jsonl" in page and "is 1 &lt; 2 &amp; &lt;b&gt;?" in page and "<b>" not in page
    assert "no list of turns" in page and "row 13, line 13" in page and page.count("<svg") == 3
    assert "src=" not in page and "href=" not in page and "http" not in page
    for name, histogram in account.histograms.items():
        assert sum(histogram.counts) == account.splits["train"].rows, name
    lengths = list(map(len, load_rows(tmp_path / "out", "train")["input_ids"]))
    assert account.histograms["tokens"].mean == pytest.approx(sum(lengths) / len(lengths))
    assert account.histograms["replies"].quantiles == [1.0] * 5


def test_an_account_of_before_several_sources_is_read():
    old = {
        "source": "data.json", "num_rows": 3, "max_token_id": 9, "settings": {"seed": 0}, "fingerprint": "f",
        "splits": {"train": {"rows": 2, "tokens": 20, "supervised": 6}},
        "dropped": {"empty": {"times": 1, "rows": [2], "example": ""}}, "changes": {},
    }  # fmt: skip

    class Folder:
        def __truediv__(self, name):
            return self

        def read_text(self, encoding):
            return json.dumps(old)

    account = RowAccount.load(Folder())
    account.check()
    assert account.num_kept == 2 and account.sources[0].name == "data.json"


BROKEN = [
    "[1, 2", '{"conversations": 3}', '{"conversations": [[["human", "q"]]]}', "null", '{"id": [1], "messages": null}',
    '{"id": "\\ud83d", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "the answer"}]}',
    '{"id": ' + "9" * 5000 + "}", "[" * 100_000, '{"messages": [{"role": 3, "content": "x"}]}', "\ufeff{}", "{}\r",
    '{"conversations": {"from": "human"}}', "\x00", '{"conversations": [{"from": "human", "value": {"a": 1}}]}', "NaN",
]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_the_file_holds_every_row_is_counted_or_the_error_is_one_line(tmp_path_factory, data):
    good = [json.dumps(row(i)) for i in range(6)]
    lines = data.draw(st.permutations(good + data.draw(st.lists(st.sampled_from(BROKEN), max_size=5))))
    joint = data.draw(st.sampled_from(["\n", "\r\n", ",\n", ","]))
    text = joint.join(lines) if joint.strip() == "" else f"[{joint.join(lines)}]"
    raw = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + text.encode()
    length = data.draw(st.sampled_from([len(raw), len(raw) // 2, 3, 0]))
    path = tmp_path_factory.mktemp("fuzz") / data.draw(st.sampled_from(["rows.jsonl", "rows.json", "rows"]))
    path.write_bytes(raw[:length])
    account = RowAccount([SourceAccount("rows")], settings={"seed": 0, "limit": None})
    try:
        kept = list(_conversations([Source(SourceConfig(path=str(path)))], account, TurnPolicy()))
    except ValueError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return
    (own,) = account.sources
    dropped = [number for entry in own.dropped.values() for number in entry.rows]
    assert sorted([*dropped, *(one.number for one in kept)]) == list(range(1, own.num_rows + 1))
    assert all("\n" not in entry.example for entry in own.dropped.values())
    if length == len(raw) and joint.strip() == "" and path.suffix == ".jsonl":
        assert len({one.digest for one in kept}) >= 6, "a broken line costs only itself"
