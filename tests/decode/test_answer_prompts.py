"""Answers to a file of prompts are the target's own, every turn of them, and a killed run loses nothing."""

import json
import sys

import pytest
import tiny_chat
import torch
from transformers import GenerationConfig

import draftwood as dw
from draftwood import cli
from draftwood.decode import answer_prompts as module
from draftwood.decode.answer_prompts import answer_prompts

ENDS = list(range(2, 259, 20))  # so many tokens end an answer that rows of a batch end apart
ROWS = [
    {"id": "a", "turns": ["hé", "more"]},
    {"question_id": 7, "turns": ["x"]},
    {"prompt": "three"},
    {"turns": ["one", "z" * 2000, "after"]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
]
SETTINGS = {"max_new_tokens": 12, "batch_size": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("answers")
    tiny_chat.save(path / "target")
    GenerationConfig(eos_token_id=ENDS, pad_token_id=0).save_pretrained(path / "target")
    (path / "prompts.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture(scope="module")
def target(folder):
    return dw.load_target(str(folder / "target"), dtype="float32")


@pytest.fixture(scope="module")
def draft(target):
    torch.manual_seed(0)
    return dw.EagleDraft.from_target(target).eval()


@pytest.fixture
def run(target, folder, tmp_path):
    def run(out="out.jsonl", draft=None, **settings):
        return answer_prompts(target, draft, folder / "prompts.jsonl", tmp_path / out, **SETTINGS | settings)

    return run


def lines(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_turn = {(line["row"], line["turn"]): line for line in found}
    assert len(by_turn) == len(found), "answered twice"
    return by_turn


def plain_answers(target, stop=None):
    """By transformers' own `generate`, one conversation at a time: text, number of tokens and why it ends."""
    found = {}
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=ENDS, pad_token_id=0, stop_strings=stop)
    for number, row in enumerate(ROWS):
        messages = list(row.get("messages", []))
        for turn, text in enumerate(row.get("turns", [row.get("prompt")]), 1):
            if text is not None:
                messages.append({"role": "user", "content": text})
            ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            ids = ids["input_ids"]
            if ids.shape[1] > 2000:
                break
            new = target.model.generate(ids, generation_config=config, tokenizer=target.tokenizer)[0, ids.shape[1] :]
            new, is_whole = new.tolist(), int(new[-1]) in ENDS
            said = target.tokenizer.decode(new[:-1] if is_whole else new, skip_special_tokens=True)
            reason = "eos" if is_whole else "stop_string" if stop and stop in said else "length"
            found[1 + 2 * number, turn] = (said, len(new), reason)
            messages.append({"role": "assistant", "content": said})
    return found


def test_every_turn_is_answered_as_transformers_would_with_and_without_a_draft(run, target, draft, tmp_path):
    expected = plain_answers(target)
    assert {reason for _, _, reason in expected.values()} == {"eos", "length"}
    for settings in ({}, {"draft": draft, "tree": "dynamic-8"}, {"batch_size": 1}):
        account = run(f"{len(settings)}.jsonl", **settings)
        found = lines(tmp_path / f"{len(settings)}.jsonl")
        too_long = [key for key, line in found.items() if line["finish_reason"] == "too_long"]
        assert too_long == [(7, 2), (7, 3)] and all(found[key]["text"] is None for key in too_long)
        answered = {key: line for key, line in found.items() if key not in too_long}
        assert {k: (v["text"], v["new_tokens"], v["finish_reason"]) for k, v in answered.items()} == expected
        assert account.is_finished and account.reasons.total() == len(expected) + 2
        for line in answered.values():
            assert line["tokens_per_s"] > 0 and (line["acceptance_length"] is None) == (line["new_tokens"] == 1)
    assert [(found[k]["id"], found[k]["prompt"]) for k in ((1, 2), (3, 1), (9, 1))] == [
        ("a", "more"), ("7", "x"), ("9", "u"),
    ]  # fmt: skip


def test_a_stop_string_ends_an_answer_and_is_its_reason(run, target, tmp_path):
    stop = next(c for text, _, _ in plain_answers(target).values() for c in text[2:] if c.isascii() and c.isalnum())
    expected = plain_answers(target, stop)
    run(stop_strings=[stop])
    found = lines(tmp_path / "out.jsonl")
    assert {k: (found[k]["text"], found[k]["new_tokens"], found[k]["finish_reason"]) for k in expected} == expected
    assert "stop_string" in {reason for _, _, reason in expected.values()}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_run_cut_off_at_any_byte_ends_with_the_same_answers(run, tmp_path, temperature):
    run("whole.jsonl", temperature=temperature, seed=3)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (1, ends[1] + 7, ends[4]):
        (tmp_path / "cut.jsonl").write_bytes(whole[:cut])
        (tmp_path / "cut.jsonl.settings.json").write_bytes((tmp_path / "whole.jsonl.settings.json").read_bytes())
        account = run("cut.jsonl", temperature=temperature, seed=3)
        kept = whole[: whole.rfind(b"\n", 0, cut) + 1]
        assert (tmp_path / "cut.jsonl").read_bytes().startswith(kept)
        untimed = [
            {key: {**line, "tokens_per_s": 0} for key, line in lines(tmp_path / name).items()}
            for name in ("cut.jsonl", "whole.jsonl")
        ]
        assert untimed[0] == untimed[1]
        assert account.num_earlier == sum(end <= cut for end in ends) and account.is_finished


def test_ctrl_c_keeps_what_has_ended_and_nothing_is_answered_twice(run, tmp_path, monkeypatch):
    append, calls = module.AnswerFile.append, []

    def interrupted(self, line):
        append(self, line)
        calls.append(line)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.AnswerFile, "append", interrupted)
        assert not run().is_finished
    assert len(lines(tmp_path / "out.jsonl")) == 2
    assert run().is_finished
    assert len(lines(tmp_path / "out.jsonl")) == 8
    monkeypatch.setattr(module, "answer_batch", lambda *_, **__: pytest.fail("answered again"))
    assert run(batch_size=2, num_prompts=3).num_earlier == 8  # nothing of this changes a greedy answer


def test_a_file_of_other_settings_target_draft_or_prompts_is_refused(run, target, draft, folder, tmp_path):
    run()
    for settings, named in (
        ({"max_new_tokens": 5}, "max_new_tokens: 12 -> 5"),
        ({"draft": draft}, "draft: None -> .*; tree: None -> DynamicTree"),
        ({"temperature": 1.0}, "temperature: 0.0 -> 1.0"),
        ({"stop_strings": ["a"]}, "stop_strings"),
    ):
        with pytest.raises(ValueError, match=f"begun with other settings .*{named}"):
            run(**settings)
    (tmp_path / "other.txt").write_text("x\n")
    with pytest.raises(ValueError, match="prompts_sha256"):
        answer_prompts(target, None, tmp_path / "other.txt", tmp_path / "out.jsonl", **SETTINGS)
    other = dw.load_target(str(folder / "target"), dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype: float32 -> bfloat16"):
        answer_prompts(other, None, folder / "prompts.jsonl", tmp_path / "out.jsonl", **SETTINGS)
    for settings, named in (({"batch_size": 0}, "batch_size is 0"), ({"tree": "sampled-2x2"}, "sampled")):
        with pytest.raises(ValueError, match=named):
            run("new.jsonl", draft=draft, **settings)
    assert not (tmp_path / "new.jsonl").exists()


def test_the_command_answers_a_file_and_says_what_it_took(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    out = tmp_path / "answers.jsonl"
    arguments = ["generate", "--prompts", str(tmp_path / "p.txt"), "--target", str(folder / "target")]

    def call(*more):
        monkeypatch.setattr(sys, "argv", ["draftwood", *arguments, *more, "--max-new-tokens", "4"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, capsys.readouterr().err

    code, err = call("--out", str(out))
    assert code == 0 and "2 answers" in err and [line["prompt"] for line in lines(out).values()] == ["one", "two"]
    code, err = call()
    assert code == 2 and "--out" in err
