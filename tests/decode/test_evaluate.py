import json

import pytest
import tiny_chat
import torch

import draftwood as dw
from draftwood.decode.benchmark_strategies import benchmark_decode
from draftwood.decode.evaluate import evaluate, transformers_generate
from draftwood.decode.prompts import (
    Prompt,
    PromptSet,
    encode_messages,
    prompts_from_rows,
    read_conversations,
    read_prompts,
)
from draftwood.decode.report import LOOP, SPECULATIVE, TRANSFORMERS
from draftwood.decode.verify import Sampling


@pytest.fixture
def prompt_set(tiny):
    ids = [tiny.prompt_ids((1, length), length) for length in (5, 2, 9)]
    return PromptSet("three", [Prompt(f"p{i}", row, "ab"[i % 2]) for i, row in enumerate(ids)])


def untrained(target):
    torch.manual_seed(0)
    return dw.EagleDraft.from_target(target).eval()


def test_report_counts_what_generate_emits_and_is_identical_in_float32(targets, tiny, prompt_set, tmp_path):
    target = targets("bamba")
    report = evaluate(target, untrained(target), prompt_set, tree="stree", max_new_tokens=20, repeats=2)
    wants = [tiny.greedy(target.model, p.input_ids, 20) for p in prompt_set.prompts]
    assert [p.new_tokens for p in report.prompts] == [len(want) for want in wants]
    assert report.num_identical == 3 and report.mismatches == []
    assert report.acceptance.num_emitted == sum(len(want) - 1 for want in wants if len(want) > 1)
    assert set(report.tokens_per_s) == {SPECULATIVE, LOOP, TRANSFORMERS}
    assert report.baseline == max((LOOP, TRANSFORMERS), key=report.tokens_per_s.get)
    assert report.speedup == report.tokens_per_s[SPECULATIVE] / report.tokens_per_s[report.baseline]
    saved = json.loads(report.save(tmp_path).read_text())
    assert saved["settings"]["tree"].startswith("stree") and saved["settings"]["dtype"] == "float32"
    assert "not counted" in saved["definitions"]["acceptance_length"]
    markdown = (tmp_path / "three.md").read_text()
    assert f"{report.acceptance.acceptance_length:.3f}" in markdown and "not counted" in markdown


def test_an_output_that_differs_is_reported_with_its_place_and_the_gap_there(targets, tiny, prompt_set, monkeypatch):
    target = targets("llama")
    module = __import__("draftwood.decode.evaluate", fromlist=["evaluate"])
    real = transformers_generate

    def broken(target, ids, max_new_tokens, sampling):
        tokens = real(target, ids, max_new_tokens, sampling)
        return [*tokens[:2], tokens[2] + 1, *tokens[3:]] if ids.shape[1] == 2 and len(tokens) > 2 else tokens

    monkeypatch.setattr(module, "transformers_generate", broken)
    report = evaluate(target, untrained(target), prompt_set, tree="chain-2", max_new_tokens=8)
    (mismatch,) = report.mismatches
    ids = prompt_set.prompts[1].input_ids
    tokens = tiny.greedy(target.model, ids, 8)
    with torch.no_grad():
        logits = target.model(torch.cat([ids, torch.tensor([tokens[:2]])], 1)).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    assert (mismatch.prompt, mismatch.position, mismatch.tokens) == (1, 2, (tokens[2], tokens[2] + 1))
    assert mismatch.top2_gap == pytest.approx(first - second, abs=1e-4)
    assert report.num_identical == 2 and "p1 | 2" in report.to_markdown()


def test_without_baseline_there_is_no_speedup_and_sampling_is_not_compared(targets, prompt_set):
    target = targets("llama")
    report = evaluate(target, untrained(target), prompt_set, tree="chain-2", max_new_tokens=6, baseline=False)
    assert report.speedup is None and report.num_identical is None and list(report.tokens_per_s) == [SPECULATIVE]
    report = evaluate(target, untrained(target), prompt_set, tree="chain-2", max_new_tokens=6, temperature=0.9)
    assert report.speedup is not None and report.num_identical is None


def test_ways_take_turns(targets, prompt_set, monkeypatch):
    target, order = targets("llama"), []
    module = __import__("draftwood.decode.evaluate", fromlist=["evaluate"])
    for name in ("generate", "transformers_generate"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, real=real, name=name, **k: order.append((name, a[1])) or real(*a, **k)
        )
    draft = untrained(target)
    evaluate(target, draft, prompt_set, tree="chain-2", max_new_tokens=4, repeats=2)
    kinds = ["hf" if name != "generate" else "draft" if second is draft else "loop" for name, second in order]
    assert kinds[3:9] == ["draft", "loop", "hf", "loop", "hf", "draft"]
    assert sorted(kinds[3:]) == sorted(["draft", "loop", "hf"] * 6)


@pytest.mark.parametrize("settings", [dict(temperature=0.7), dict(temperature=1.3, top_k=4, top_p=0.8)])
def test_transformers_samples_with_the_same_settings(settings, targets, tiny):
    target, ids = targets("llama"), tiny.prompt_ids((1, 4), 1)
    torch.manual_seed(0)
    drawn = [transformers_generate(target, ids, 1, Sampling(**settings))[0] for _ in range(400)]
    with torch.no_grad():
        p = Sampling(**settings).probs(target.model(ids).logits[0, -1])
    share = torch.bincount(torch.tensor(drawn), minlength=len(p)) / 400
    assert (share - p).abs().max() < 0.12
    assert not share[p == 0].any()


def test_prompts_come_from_the_first_turn_through_the_template(tmp_path):
    tokenizer = tiny_chat.tokenizer()
    path = tmp_path / "some.jsonl"
    rows = [
        {"question_id": 7, "category": "x", "turns": ["hé", "second"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"turns": ["long" * 50]},
        {"turns": ["last"]},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    prompts = read_prompts(path, tokenizer, max_tokens=60)
    assert prompts.name == "some" and prompts.num_too_long == 1
    assert [(p.name, p.category) for p in prompts.prompts] == [("7", "x"), ("3", ""), ("7", "")]
    assert [tokenizer.decode(p.input_ids[0]) for p in prompts.prompts] == [
        "<s>user:hé<s>assistant:",
        "<s>system:s<s>user:u<s>assistant:",
        "<s>user:last<s>assistant:",
    ]
    assert len(read_prompts(path, tokenizer, limit=1).prompts) == 1
    plain = encode_messages(tiny_chat.tokenizer(None), [{"role": "user", "content": "abc"}])
    assert tokenizer.decode(plain[0]) == "abc"


def test_later_turns_are_prompts_after_the_targets_own_answers(tmp_path):
    target = dw.load_target(str(tiny_chat.save(tmp_path / "target")), dtype="float32")
    path = tmp_path / "some.jsonl"
    rows = {"a": ["h\u00e9", "more", "end"], "b": ["x"], "c": ["y", "z" * 150]}
    path.write_text("\n".join(json.dumps({"id": name, "turns": turns}) for name, turns in rows.items()))
    prompts = read_prompts(path, target.tokenizer, max_tokens=120)
    report = evaluate(target, untrained(target), prompts, tree="chain-2", max_new_tokens=5)
    assert [(p.name, p.turn) for p in report.prompts] == [("a.1", 1), ("a.2", 2), ("a.3", 3), ("b", 1), ("c.1", 1)]
    assert report.num_identical == 5 and report.settings["prompts left out as too long"] == 1
    assert list(report.groups["turn"]) == ["1", "2", "3"]
    messages, lengths = [], []
    for text in rows["a"]:
        messages.append({"role": "user", "content": text})
        ids = encode_messages(target.tokenizer, messages)
        lengths.append(ids.shape[1])
        own = target.model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        messages.append({"role": "assistant", "content": target.tokenizer.decode(own, skip_special_tokens=True)})
    assert [p.prompt_tokens for p in report.prompts[:3]] == lengths
    settings = dict(strategies=["lookup"], temperatures=(0.0,), max_new_tokens=5)
    (table,) = benchmark_decode({"float32": (target, None)}, [prompts], **settings).tables
    assert {row.num_identical for row in table.rows} == {5}


def test_prompts_are_read_from_json_lines_an_array_or_plain_text(tmp_path):
    rows = [{"id": 1, "turns": ["a\u2028b", "c"]}, {"id": 2, "prompt": "d"}]
    expected = [("1", "a\u2028b", ("c",)), ("2", "d", ())]
    files = {"x.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "x.json": json.dumps(rows)}
    for name, text in files.items():
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        found = list(read_conversations(tmp_path / name))
        assert [(c.name, c.messages[0]["content"], c.later) for c in found] == expected, name
    (tmp_path / "x.txt").write_text("[INST] one\n\n{two}\n")
    found = [(c.row, c.messages[0]["content"]) for c in read_conversations(tmp_path / "x.txt")]
    assert found == [(1, "[INST] one"), (3, "{two}")]
    for name, text, message in (
        ("o.json", "{}", "expected an array"),
        ("b.json", '[{"prompt": " "}]', "entry 1: a blank prompt"),
        ("p.jsonl", "plain", r"line 1: not JSON .*\.txt"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            list(read_conversations(tmp_path / name))


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"turns": []}', '{"turns": [1]}'])
def test_a_bad_line_is_named(line, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["a"]}\n' + line)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        read_prompts(path, tiny_chat.tokenizer())


def test_prompts_of_rows_end_where_the_first_reply_starts():
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 0, 1, 1]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
    ]
    prompts = prompts_from_rows(rows, "validation")
    assert [p.input_ids.tolist() for p in prompts.prompts] == [[[5, 6, 7]], [[5]]]
    assert prompts_from_rows(rows, "validation", max_tokens=2).num_too_long == 1
    with pytest.raises(ValueError, match="no prompt left"):
        prompts_from_rows(rows[2:], "validation")


def test_acceptance_is_reported_by_task_turn_and_context_with_intervals(targets, tiny):
    ids = [tiny.prompt_ids((1, length), length) for length in (5, 126, 9)]
    prompts = [Prompt(f"p{i}", row, "ab"[i % 2], turn=1 + i // 2) for i, row in enumerate(ids)]
    target = targets("llama")
    report = evaluate(
        target, untrained(target), PromptSet("x", prompts), tree="stree", max_new_tokens=8, baseline=False
    )
    assert set(report.groups) == {"task", "turn", "context"}
    assert list(report.groups["task"]) == ["a", "b"] and list(report.groups["turn"]) == ["1", "2"]
    assert list(report.groups["context"]) == ["0-127", "128-511"]
    for groups in report.groups.values():
        assert sum(group.num_forwards for group in groups.values()) == report.acceptance.num_forwards
        assert all(g.interval[0] <= g.acceptance_length <= g.interval[1] for g in groups.values())
    assert "acceptance length, task a" in report.to_markdown() and "turn 2" in report.to_markdown()


def test_every_reply_of_a_conversation_can_be_a_prompt():
    rows = [{"input_ids": list(range(9)), "loss_mask": [0, 0, 1, 1, 0, 0, 0, 1, 1]}]
    every = prompts_from_rows(rows, "x", every_turn=True).prompts
    assert [(p.name, p.turn, p.input_ids.shape[1]) for p in every] == [("0.1", 1, 2), ("0.2", 2, 7)]
    assert [p.input_ids.shape[1] for p in prompts_from_rows(rows, "x").prompts] == [2]
