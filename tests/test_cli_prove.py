"""certify, plan and compare from the command line, on a tiny target."""

import json
import sys

import pytest
import tiny_chat
import torch

import draftwood as dw
from draftwood import cli
from draftwood.decode import generate as loop
from draftwood.decode import stats
from draftwood.models.checkpoint import save_draft


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target and two untrained drafts of it, saved."""
    root = tmp_path_factory.mktemp("models")
    target = dw.load_target(str(tiny_chat.save(root / "target")))
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        save_draft(dw.EagleDraft.from_target(target), root / name)
    return root


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["draftwood", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


def test_certify_writes_beside_the_draft_and_its_exit_code_says_whether_it_passed(folders, run, monkeypatch):
    arguments = ["certify", folders / "target", folders / "one", "--quick", "--rows", "60", "--max-new-tokens", "6"]
    assert run(*arguments, "--tree", "stree")[0] == 0
    certificate = json.loads((folders / "one" / "certificate.json").read_text())
    assert certificate["passed"] and certificate["settings"]["trees"] == ["stree"]
    monkeypatch.setattr(loop, "verify_greedy", lambda *_: 1 / 0)
    code, out, _ = run(*arguments, "--out", folders / "bad.json")
    assert code == 1 and "FAIL" in out and not json.loads((folders / "bad.json").read_text())["passed"]


def test_a_plan_lies_beside_the_draft_and_generate_takes_it(folders, run):
    small = ["--num-prompts", "2", "--max-new-tokens", "12", "--repeats", "1"]
    code, out, _ = run("plan", folders / "target", folders / "one", *small)
    assert code == 0 and "speculate" in out
    plan = json.loads((folders / "one" / "plan.json").read_text())
    assert plan["best"] == "float32" and plan["plans"]["float32"]["costs_ms"]["verify"]
    ask = ["generate", "hé", "--target", folders / "target", "--max-new-tokens", "9"]
    planned = run(*ask, "--draft", folders / "one", "--tree", "plan")
    assert planned[0] == 0 and planned[1] == run(*ask)[1]
    code, _, err = run(*ask, "--draft", folders / "two", "--tree", "plan")
    assert code == 2 and "draftwood plan" in err and "Loading" not in err
    assert "no draft" in run(*ask, "--tree", "plan")[2]
    code, _, err = run(*ask, "--draft", folders / "two", "--tree", folders / "one" / "plan.json")
    assert code == 2 and "a plan for other weights than those of" in err and "Loading" not in err
    code, _, err = run("plan", folders / "target", folders / "one", "--num-prompts", "9")
    assert code == 2 and "there are 8 built-in prompts" in err and "Loading" not in err


def test_compare_gives_the_paired_difference(folders, run, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"turns": ["a"]}\n{"turns": ["bcd"]}\n')
    both = [folders / "one", folders / "two", "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "out"]
    code, out, _ = run("compare", folders / "target", *both, "--tree", "stree", "--max-new-tokens", "6")
    assert code == 0 and "paired difference" in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (difference,) = report["differences"].values()
    assert difference["against"] == str(folders / "one")
    assert difference["interval"][0] <= difference["difference"] <= difference["interval"][1]
    assert "two or more" in run("compare", folders / "target", folders / "one", *both[2:])[2]
    model = ["compare", folders / "target", folders / "one", f"model:{folders / 'target'}", *both[2:]]
    code, out, _ = run(*model, "--tree", "chain-2", "--max-new-tokens", "6")
    assert code == 0 and "model:" in out


def test_a_comparison_calls_a_draft_of_which_nothing_is_kept_a_fault(folders, run, tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "FAULT_FORWARDS", 3)
    (tmp_path / "p.jsonl").write_text('{"turns": ["a"]}\n{"turns": ["bcd"]}\n')
    rest = ["--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "out", "--tree", "chain-1", "--max-new-tokens", "12"]
    code, out, _ = run("compare", folders / "target", folders / "one", folders / "two", *rest)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    lengths = [one["acceptance"]["acceptance_length"] for one in report["reports"].values()]
    assert code == 0 and out.count("FAULT") == lengths.count(1.0) and 1.0 in lengths
