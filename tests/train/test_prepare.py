"""Prepared data: every entry of the source is accounted for, and a folder is finished, reused, or not there."""

import io
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from draftwood.train import prepare as prepare_module
from draftwood.train.fingerprint import check_token_ids
from draftwood.train.prepare import load_rows, prepare
from draftwood.train.report import RowAccount, SourceAccount
from draftwood.train.rows import supervised_rows
from draftwood.train.split import choose_validation
from draftwood.train.turns import TurnPolicy

QUIET = Console(quiet=True)


def row(i, *turns, **extra) -> dict:
    turns = turns or (("human", f"question {i}"), ("gpt", f"the answer {i}"))
    return {"id": i, "conversations": [{"from": role, "value": value} for role, value in turns], **extra}


MESSY = [
    row("a"),
    row("b", ("human", "q"), ("human", "r"), ("gpt", "there")),
    row("c", ("gpt", "x"), ("human", "q"), ("gpt", "hello there")),
    row("d", ("system", "s"), ("human", "q"), ("gpt", " "), ("human", "r"), ("gpt", "you")),
    {"id": 5, "conversations": []},
    row("f", ("human", "q"), ("bing", "words of another")),
    row("g", ("human", "q2"), ("gpt", "answer"), ("human", "r"), ("bard", "words of another")),
    row("h", ("human", "q"), ("gpt", None)),
    row("i", ("human", "q"), ("gpt", ["x"])),
    row("again", ("human", "question a"), ("gpt", "the answer a")),
    row("k", ("human", "long " * 60), ("gpt", "too late")),
    row("l", ("human", "q3"), ("gpt", "long " * 60)),
    row("m", ("human", "q"), ("gpt", "a <|im_end|> mark")),
    17,
    *[row(i) for i in range(6)],
]
DROPPED = {
    "empty": [5], "no_reply": [6], "value_not_text": [8, 9], "duplicate": [10], "clipped_to_nothing": [11],
    "special_token_in_text": [13], "not_an_object": [14], "not_json": [21], "cut_off": [24],
}  # fmt: skip
CHANGED = {
    "same_role_merged": [2, 4], "leading_reply_dropped": [3], "blank_turn_dropped": [4], "unknown_role_cut": [7],
    "unanswered_turn_dropped": [7], "clipped": [12],
}  # fmt: skip


@pytest.fixture
def source(tmp_path) -> Path:
    """The messy rows, then a broken one, two good ones, and one that the end of the file cuts off."""
    text = json.dumps([*MESSY, row("broken"), row("y"), row("z"), row("tail")], indent=1)
    text = text.replace('"id": "broken"', '"id": broken')
    path = tmp_path / "messy.json"
    path.write_text(text[: text.index("the answer tail") + 4])
    return path


@pytest.fixture
def run(chat_tokenizer, tmp_path):
    def run(source, out="out", tokenizer=None, **options):
        options = {"max_length": 60, "num_validation": 4, "seed": 0, "console": QUIET, **options}
        return prepare(source, tokenizer or chat_tokenizer(), tmp_path / out, **options)

    return run


@pytest.fixture
def clean(tmp_path) -> Path:
    path = tmp_path / "clean.jsonl"
    path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(30)))
    return path


def sources(folder, split) -> list[int]:
    return load_rows(folder, split)["source_row"]


def test_every_entry_of_a_messy_source_is_kept_once_or_dropped_for_its_reason(source, run, tmp_path):
    account = run(source)
    (own,) = account.sources
    assert {reason: entry.rows for reason, entry in own.dropped.items()} == DROPPED
    assert {name: entry.rows for name, entry in own.changes.items()} == CHANGED
    assert own.changes["same_role_merged"].times == 2
    kept = sorted([*sources(tmp_path / "out", "train"), *sources(tmp_path / "out", "validation")])
    dropped = [number for rows in DROPPED.values() for number in rows]
    assert sorted(kept + dropped) == list(range(1, 25)) and account.num_rows == 24
    assert account.splits["validation"].rows == 4 and account.splits["train"].rows == len(kept) - 4
    assert "row 8, line " in own.dropped["value_not_text"].example


def test_account_counts_the_tokens_and_supervised_rows_that_are_in_the_folders(source, run, tmp_path):
    account = run(source)
    for split in ("train", "validation"):
        rows = load_rows(tmp_path / "out", split).with_format("torch")
        assert sum(len(r["input_ids"]) for r in rows) == account.splits[split].tokens
        assert sum(int(supervised_rows(r["loss_mask"]).sum()) for r in rows) == account.splits[split].supervised
        assert all(len(r["input_ids"]) == len(r["loss_mask"]) <= 60 for r in rows)
        assert max(int(r["input_ids"].max()) for r in rows) <= account.max_token_id
    assert RowAccount.load(tmp_path / "out") == account


def test_words_of_an_unknown_role_are_in_no_row(source, run, chat_tokenizer, tmp_path):
    for unknown_role in ("cut", "drop_turn", "drop_row"):
        run(source, unknown_role, policy=TurnPolicy(unknown_role=unknown_role))
        for split in ("train", "validation"):
            for ids in load_rows(tmp_path / unknown_role, split)["input_ids"]:
                assert "another" not in chat_tokenizer().decode(ids)


def test_rows_keep_their_prompt_as_messages_and_their_source(source, run, tmp_path):
    run(source)
    rows = {r["source_row"]: r for s in ("train", "validation") for r in load_rows(tmp_path / "out", s)}
    assert rows[4]["prompt"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "q\n\nr"}]
    assert rows[4]["source_id"] == "d" and rows[15]["source_id"] == "0"


def test_table_shows_every_part_and_the_sum(source, run):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(run(source))
    shown = console.export_text()
    assert "a turn whose text is null or not text" in shown and "clipped to max_length" in shown
    assert "in the source" in shown and " 24 " in shown


def test_worker_processes_give_the_rows_of_one_process_and_no_fork_warning(
    clean, run, tmp_path, chat_tokenizer, capfd, monkeypatch
):
    monkeypatch.setattr("draftwood.train.parallel.WINDOW", 10)
    monkeypatch.setattr("draftwood.train.parallel.CHUNK", 3)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    chat_tokenizer()(["a batch", "wakes the tokenizer's", "own threads"])
    alone, shared = run(clean, "alone"), run(clean, "shared", num_proc=2)
    assert alone == shared
    for split in ("train", "validation"):
        assert load_rows(tmp_path / "alone", split).to_list() == load_rows(tmp_path / "shared", split).to_list()
    assert "fork" not in capfd.readouterr().err
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_split_follows_the_conversation_not_its_place_in_the_file(clean, run, tmp_path):
    run(clean, "first")
    lines = clean.read_text().splitlines()
    random.Random(0).shuffle(lines)
    moved = tmp_path / "moved.jsonl"
    moved.write_text("\n".join(lines) + "\n")
    run(moved, "second")
    held_out = [set(load_rows(tmp_path / out, "validation")["source_id"]) for out in ("first", "second")]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 4
    run(clean, "other", seed=1)
    assert set(load_rows(tmp_path / "other", "validation")["source_id"]) != held_out[0]


def test_equal_conversations_and_parts_of_one_never_straddle_the_split(tmp_path, run):
    rows = [
        row(f"Part{i:03d}_{part}", ("human", f"{i} {part}"), ("gpt", "there you")) for i in range(10) for part in (0, 7)
    ]
    rows += [row(f"copy{i}", ("human", f"{i} 0"), ("gpt", "there you")) for i in range(10)]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(rows))
    run(path, num_validation=9, policy=TurnPolicy(duplicates="keep"))

    def family(source_id):
        return int(source_id[4:7] if source_id.startswith("Part") else source_id[4:])

    train, held_out = (load_rows(tmp_path / "out", split)["source_id"] for split in ("train", "validation"))
    assert len(train) == 21 and len(held_out) == 9
    assert {family(i) for i in train}.isdisjoint({family(i) for i in held_out})


def test_ids_that_would_make_one_family_of_all_rows_are_refused_with_the_way_out():
    rows = [(f"example_{i}", f"digest{i}") for i in range(10)]
    with pytest.raises(ValueError, match="parts_by_id=False"):
        choose_validation(rows, 3, seed=0)
    assert len(choose_validation(rows, 3, seed=0, parts_by_id=False)) == 3
    assert choose_validation(rows, 0, seed=0) == set()
    with pytest.raises(ValueError, match="num_validation is 10, but 10 rows"):
        choose_validation(rows, 10, seed=0)


def test_a_finished_folder_is_reused_and_other_settings_are_refused_by_name(clean, run, tmp_path, monkeypatch, caplog):
    account = run(clean)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(prepare_module, "map_rows", lambda *_: pytest.fail("tokenised again"))
        assert run(clean) == account
        assert "reused" in caplog.text
        with pytest.raises(ValueError, match="prepared with another max_length, seed: choose another folder"):
            run(clean, max_length=50, seed=3)
    assert run(clean, max_length=50, overwrite=True).settings["max_length"] == 50
    clean.write_text(clean.read_text() + json.dumps(row("more")) + "\n")
    with pytest.raises(ValueError, match="another source_sha256"):
        run(clean, max_length=50)


def test_an_interrupted_run_leaves_nothing_and_the_next_starts_over(clean, run, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "choose_validation", stop)
        with pytest.raises(KeyboardInterrupt):
            run(clean)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out-partial*"))
    killed = tmp_path / ".out-partial-killed"
    killed.mkdir()
    (killed / "all.arrow").write_bytes(b"half")
    assert run(clean).num_kept == 30
    assert not killed.exists()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "account.json",
        "report.html",
        "train",
        "validation",
    ]


def test_a_folder_of_other_files_is_left_alone(clean, run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no prepared rows"):
        run(clean, overwrite=True)
    with pytest.raises(ValueError, match="run prepare first"):
        load_rows(tmp_path / "out", "train")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_a_source_without_a_usable_row_says_why(tmp_path, run):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "hello"}) + "\n")
    with pytest.raises(ValueError, match=r"no row of data.jsonl can be used: 1 no_turns \(row 1, line 1: .*'text'"):
        run(path)
    assert not (tmp_path / "out").exists()


def test_limit_counts_entries_of_the_source(source, run):
    account = run(source, limit=7, num_validation=1)
    assert account.num_rows == 7 and account.num_dropped == 2


def test_rows_of_another_tokenizer_template_or_vocabulary_are_refused(clean, run, chat_tokenizer, tmp_path):
    account = run(clean)
    tokenizer = chat_tokenizer()
    tokenizer("pad me", padding="max_length", max_length=9, truncation=True)
    assert run(clean, tokenizer=tokenizer) == account
    with pytest.raises(ValueError, match="prepared with another template_sha256"):
        run(clean, tokenizer=chat_tokenizer("inst"))
    tokenizer.add_tokens(["newword"])
    with pytest.raises(ValueError, match="prepared with another tokenizer_sha256"):
        run(clean, tokenizer=tokenizer)
    largest = max(max(r["input_ids"]) for split in ("train", "validation") for r in load_rows(tmp_path / "out", split))
    check_token_ids(tmp_path / "out", largest + 1)
    with pytest.raises(ValueError, match=f"hold token {largest}, but the target's vocabulary has {largest}"):
        check_token_ids(tmp_path / "out", largest)


def test_an_account_whose_parts_do_not_add_up_fails():
    account = RowAccount([SourceAccount("data", num_rows=3)])
    with pytest.raises(AssertionError, match="0 kept and 0 dropped are not the 3 rows"):
        account.check()


def test_worker_processes_end_although_the_parent_has_run_a_model(tmp_path):
    """A target that was loaded first leaves OpenMP threads behind; workers must not wait for them. Nor do they hear of
    a Ctrl-C, the first one not excepted."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\n"
        "from types import SimpleNamespace\n"
        "import torch\n"
        "from draftwood.train.parallel import map_rows\n"
        "def build(messages):\n"
        "    torch.ones(300_000).exp().mean()\n"
        "    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "if __name__ == '__main__':\n"
        "    torch.set_num_threads(2)\n"
        "    build(None)\n"
        "    print(sum(blocked for _, blocked in map_rows(build, [SimpleNamespace(messages=[])] * 40, 2)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], check=True, timeout=100, capture_output=True, text=True)
    assert done.stdout.split() == ["40"]
