"""Self-distillation: the answers are the target's own, whatever draft helps, and a killed run loses nothing."""

import json
import sys

import pytest
import tiny
import tiny_run
import torch
from filelock import FileLock
from transformers import GenerationConfig

import draftwood as dw
from draftwood import cli
from draftwood.decode.answers import EOS, Answer
from draftwood.decode.stats import RowStats
from draftwood.train import regenerate as module
from draftwood.train.prepare import prepare
from draftwood.train.regenerate import regenerate

COUNT = 7
ENDS = list(range(2, 20))  # so many tokens end an answer that conversations go on to their second turn
SETTINGS = {"max_new_tokens": 6, "max_length": 120, "batch_size": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("regenerate")
    tiny_run.make(path, "bamba", count=COUNT)
    GenerationConfig(eos_token_id=ENDS, pad_token_id=0).save_pretrained(path / "target")
    return path


@pytest.fixture(scope="module")
def target(folder):
    return dw.load_target(str(folder / "target"))


@pytest.fixture(scope="module")
def draft(target):
    torch.manual_seed(0)
    return dw.EagleDraft.from_target(target).eval()


@pytest.fixture
def run(target, folder, tmp_path):
    def run(out="out.jsonl", source=folder / "rows.jsonl", **settings):
        return regenerate(target, source, tmp_path / out, **SETTINGS | settings)

    return run


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_row(path) -> dict[int, list[str]]:
    return {line["source_row"]: [turn["value"] for turn in line["conversations"]] for line in lines(path)}


def plain_answers(target, rows: list[dict]) -> dict[int, list[str]]:
    """By transformers' own `generate`, a conversation at a time, on a model that nothing of ours has touched."""
    model, tokenizer = tiny.build("bamba"), target.tokenizer
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=ENDS, pad_token_id=0)
    found = {}
    for number, row in enumerate(rows, 1):
        messages = []
        for turn in row["conversations"][::2]:
            messages.append({"role": "user", "content": turn["value"]})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            out = model.generate(ids, generation_config=settings)[0, ids.shape[1] :].tolist()
            text = tokenizer.decode(out[:-1] if out[-1] in ENDS else out, skip_special_tokens=True)
            if text:
                messages.append({"role": "assistant", "content": text})
            if not text or out[-1] not in ENDS:
                break
        found[number] = [message["content"] for message in messages]
    return found


def test_every_answer_is_the_targets_own_greedy_one_turn_by_turn_with_and_without_a_draft(
    run, target, draft, folder, tmp_path
):
    expected = plain_answers(target, tiny_run.conversations(COUNT))
    assert any(len(texts) == 4 for texts in expected.values()), "no conversation has a second answer"
    alone, helped, single = (
        run("alone.jsonl"),
        run("helped.jsonl", draft=draft, tree="dynamic-8"),
        run("single.jsonl", batch_size=1),
    )
    for name, account in (("alone", alone), ("helped", helped), ("single", single)):
        assert by_row(tmp_path / f"{name}.jsonl") == expected, name
        assert account.is_finished and account.num_lines == account.num_rows == COUNT
        assert account.num_answers == sum(len(texts) // 2 for texts in expected.values())
    assert alone.tokens == alone.forwards and alone.stopped["unfinished"] > 0 and alone.stopped["blank_answer"] > 0
    assert [line["id"] for line in lines(tmp_path / "alone.jsonl") if line["source_row"] == 3] == ["c2"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_run_cut_off_at_any_byte_ends_with_the_same_file(run, tmp_path, temperature):
    run("whole.jsonl", temperature=temperature, seed=3)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    settings = (tmp_path / "whole.jsonl.settings.json").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (1, ends[0], ends[4] - 1) if temperature else (ends[4] + 9,):
        (tmp_path / "cut.jsonl").write_bytes(whole[:cut])
        (tmp_path / "cut.jsonl.settings.json").write_bytes(settings)
        account = run("cut.jsonl", temperature=temperature, seed=3)
        assert (tmp_path / "cut.jsonl").read_bytes() == whole, cut
        assert account.num_earlier == sum(end <= cut for end in ends) and account.num_lines == COUNT
    if temperature:
        run("other.jsonl", temperature=temperature, seed=4)
        assert by_row(tmp_path / "other.jsonl") != by_row(tmp_path / "whole.jsonl")


def test_ctrl_c_keeps_what_is_written_and_what_is_there_is_not_answered_again(run, tmp_path, monkeypatch):
    run("whole.jsonl")
    calls, answer_batch = [], module.answer_batch

    def interrupted(*arguments, **settings):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer_batch(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(module, "answer_batch", interrupted)
        account = run("cut.jsonl")
    assert not account.is_finished and 0 < account.num_lines < COUNT
    assert len(lines(tmp_path / "cut.jsonl")) == account.num_lines
    assert run("cut.jsonl").is_finished
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    monkeypatch.setattr(module, "answer_batch", lambda *_, **__: pytest.fail("answered again"))
    assert run("cut.jsonl").num_earlier == COUNT


def test_other_settings_a_foreign_file_and_a_second_process_are_refused(run, tmp_path, draft):
    run(limit=2)
    with pytest.raises(ValueError, match="begun with other settings .max_new_tokens: 6 -> 5.: undo the change"):
        run(max_new_tokens=5)
    with pytest.raises(ValueError, match=r"seed: None -> 0; temperature: 0.0 -> 1.0; .*tree|temperature"):
        run(temperature=1.0)
    run(limit=4, batch_size=2, draft=draft)  # nothing of this changes a greedy answer
    with FileLock(tmp_path / ".out.jsonl.lock"), pytest.raises(ValueError, match="another process is writing it"):
        run()
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="mine.jsonl is there and was not begun by this command"):
        run("mine.jsonl")
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match="out.jsonl, line 5: not written by this command"):
        run()


def test_every_entry_is_a_line_or_dropped_for_a_reason_and_prepare_reads_the_file(run, tmp_path, target, monkeypatch):
    def one_word(target, draft, prompts, **settings):
        return [Answer(target.tokenizer.decode([40, 41]), [40, 41, ENDS[0]], RowStats(), EOS, 0.0) for _ in prompts]

    monkeypatch.setattr(module, "answer_batch", one_word)

    def said(*turns):
        return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}

    rows = [
        said(("human", "w1 w2"), ("gpt", "w3")),
        said(("human", "w1 w2"), ("gpt", "another answer")),
        said(("system", "w9"), ("human", "w4"), ("gpt", "w5"), ("human", "w6 w7")),
        said(("human", "w1 " * 150), ("gpt", "w3")),
        said(("human", "w8"), ("bing", "w5"), ("human", "w6")),
        said(("gpt", "w8")),
        {"id": 1},
        said(("human", "w3"), ("gpt", " "), ("human", "w4 " * 104), ("human", "w5"), ("gpt", "w5")),
        said(("human", "w9 w9"), ("gpt", "w3"), ("human", "w4 " * 100), ("gpt", "w5")),
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    account = run(source=source, max_new_tokens=40)
    assert dict(account.dropped) == {"duplicate": 1, "no_reply": 1, "no_turns": 1}
    assert account.num_rows == 9 and account.num_lines == 6 and account.stopped == {"too_long": 3}
    found = {line["source_row"]: line for line in lines(tmp_path / "out.jsonl")}
    roles = {number: "".join(turn["from"][0] for turn in line["conversations"]) for number, line in found.items()}
    assert roles == {1: "hg", 3: "shghg", 4: "h", 5: "hg", 8: "hgh", 9: "hgh"}, roles
    assert found[3]["conversations"][2]["value"] == target.tokenizer.decode([40, 41])
    prepared = prepare(tmp_path / "out.jsonl", target.tokenizer, tmp_path / "rows", max_length=120, num_validation=1)
    (own,) = prepared.sources
    assert own.num_rows == 6 and {reason: len(entry.rows) for reason, entry in own.dropped.items()} == {"no_reply": 1}


def test_settings_that_leave_no_room_are_named(run, target):
    with pytest.raises(ValueError, match="max_new_tokens 120 and max_length 120; .*room for a prompt"):
        run(max_new_tokens=120)
    with pytest.raises(ValueError, match="max_length is 9999999, but .* has positions for"):
        run(max_length=9_999_999)


def test_the_command_writes_lines_that_prepare_takes(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "own.jsonl"
    arguments = ["regenerate", str(folder / "target"), str(folder / "rows.jsonl"), "--out", str(out), "--limit", "4"]
    monkeypatch.setattr(
        sys, "argv", ["draftwood", *arguments, "--max-new-tokens", "6", "--max-length", "100", "--device", "cpu"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr().out
    assert not ended.value.code and "conversations" in printed and len(lines(out)) == 4
