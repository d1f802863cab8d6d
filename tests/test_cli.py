import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_chat
import tiny_run
import torch

import draftwood as dw
from draftwood import cli


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target and an untrained draft of it, saved."""
    root = tmp_path_factory.mktemp("models")
    target = dw.load_target(str(tiny_chat.save(root / "target")))
    torch.manual_seed(0)
    dw.EagleDraft.from_target(target)
    from draftwood.models.checkpoint import save_draft

    save_draft(dw.EagleDraft.from_target(target), root / "draft")
    return str(root / "target"), str(root / "draft")


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(*arguments)`: exit code, standard output and standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["draftwood", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return call


def test_help_needs_no_torch():
    code = "import sys, draftwood.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_generate_prints_the_text_and_keeps_the_figures_apart(folders, run):
    target, draft = folders
    with_drafts = run(
        "generate", "hé", "--target", target, "--draft", draft, "--tree", "chain-3", "--max-new-tokens", "9"
    )
    alone = run("generate", "hé", "--target", target, "--max-new-tokens", "9")
    assert with_drafts[0] == alone[0] == 0
    assert with_drafts[1] == alone[1] != ""
    assert "acceptance length" in with_drafts[2] and "9 tokens" in with_drafts[2]


def test_evaluate_writes_a_report_for_each_source(folders, run, tmp_path):
    target, draft = folders
    arguments = ["evaluate", "--target", target, "--draft", draft, "--tree", "stree", "--max-new-tokens", "6"]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"turns": [name]}) + "\n")
        arguments += ["--prompts", str(tmp_path / f"{name}.jsonl")]
    code, out, _ = run(*arguments, "--out", str(tmp_path / "reports"))
    assert code == 0 and "acceptance length" in out
    for name in ("one", "two"):
        report = json.loads((tmp_path / "reports" / f"{name}.json").read_text())
        assert report["num_identical"] == len(report["prompts"]) == 1


def test_evaluate_compares_several_trees_with_the_first(folders, run, tmp_path):
    (tmp_path / "few.jsonl").write_text('{"turns": ["a"]}\n{"turns": ["bcd"]}\n')
    arguments = ["evaluate", "--target", folders[0], "--draft", folders[1], "--prompts", tmp_path / "few.jsonl"]
    arguments += ["--out", tmp_path / "out", "--max-new-tokens", "6", "--tree", "chain-2"]
    code, out, _ = run(*arguments, "--tree", "stree")
    assert code == 0 and "paired ratio" in out
    report = json.loads((tmp_path / "out" / "few.json").read_text())
    assert report["differences"]["stree"]["against"] == "chain-2" and report["reports"].keys() == {"chain-2", "stree"}
    assert "different ones" in run(*arguments, "--tree", "chain-2")[2]
    assert "temperature" in run(*arguments, "--tree", "sampled-2x2")[2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tree", "egle-25"], "did you mean 'eagle-25'"),
        (["--draft", "nowhere"], "nowhere"),
        (["--top-p", "0.5"], "temperature 0"),
        (["--dtype", "float31"], "float31"),
        (["--tree", "dynamic-100000"], "from 1 to 9999"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, folders, run):
    code, out, err = run("generate", "x", "--target", folders[0], *arguments)
    line = next(line for line in err.splitlines() if line.startswith("draftwood: "))
    assert code == 2 and out == "" and message in line and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["x", "--max-new-tokens", "0"], "max-new-tokens"),
        (["x", "--temperature", "-1"], "temperature is -1"),
        (["x", "--temperature", "1", "--top-k", "0"], "top_k is 0"),
        (["x", "--temperature", "1", "--top-p", "2"], "top_p is 2"),
        (["--prompts", "no.jsonl", "--out", "out.jsonl"], "no.jsonl: no such file; expected a file of prompts"),
        (["--prompts", ".", "--out", "out.jsonl"], "a folder; expected a file of prompts"),
        (["--prompts", "bad.jsonl", "--out", "out.jsonl"], "bad.jsonl, line 2: expected an object"),
    ],
)
def test_a_wrong_setting_is_named_before_the_target_is_loaded(arguments, message, run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"turns": ["x"]}\n{}\n')
    monkeypatch.setattr("draftwood.models.target.open_target", lambda *_: 1 / 0)
    code, _, err = run("generate", *arguments)
    assert code == 2 and message in err and "Traceback" not in err


def test_a_draft_of_another_target_is_refused_before_the_target_is_loaded(folders, run, monkeypatch, tmp_path):
    target, draft = folders
    description = json.loads((Path(draft) / "draft.json").read_text())
    description["target"] |= {"name": "the-other", "num_layers": 77}
    shutil.copytree(draft, tmp_path / "draft")
    (tmp_path / "draft" / "draft.json").write_text(json.dumps(description))
    monkeypatch.setattr("draftwood.models.target.open_target", lambda *_: 1 / 0)
    (tmp_path / "p.jsonl").write_text('{"turns": ["x"]}')
    prompts = ["--prompts", str(tmp_path / "p.jsonl")]
    for command in (
        ["generate", "x", "--target", target, "--draft", str(tmp_path / "draft")],
        ["compare", target, draft, str(tmp_path / "draft"), *prompts],
        ["benchmark", "decode", "--target", target, "--draft", str(tmp_path / "draft"), *prompts],
    ):
        code, _, err = run(*command)
        assert code == 2 and "num_layers 77" in err and "--target the-other" in err


def test_doctor_says_what_a_target_is(folders, run, tmp_path):
    code, out, _ = run("doctor", folders[0], "--json", str(tmp_path / "doctor.json"))
    diagnosis = json.loads((tmp_path / "doctor.json").read_text())
    assert code == 0 and "pass" in out and "FAIL" not in out
    assert diagnosis["healthy"] and len(diagnosis["findings"]) == 5


def test_doctor_ends_with_1_for_a_sick_target(folders, run, monkeypatch):
    from draftwood.models import doctor, gates

    def wrong(target):
        raise ValueError("head(features) differs")

    monkeypatch.setattr(gates, "check_head", wrong)
    assert doctor.gates is gates
    code, out, _ = run("doctor", folders[0])
    assert code == 1 and "NOT SOUND" in out and "head(features) differs" in out


def test_prepare_then_distil_then_generate(run, tmp_path, monkeypatch):
    tiny_run.make(tmp_path)
    target, rows = str(tmp_path / "target"), str(tmp_path / "rows.jsonl")
    code, out, _ = run(
        *("prepare", "--source", rows, "--target", target, "--out", str(tmp_path / "rows")),
        *("--max-length", "40", "--num-validation", "5", "--num-proc", "1"),
    )
    assert code == 0 and "29" in out
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        f"name: small\noutput: {tmp_path}\ntarget: {{name: {target}}}\n"
        f"data: {{source: {rows}, folder: {tmp_path / 'rows2'}, max_length: 40, num_validation: 5, num_proc: 1}}\n"
        "loop: {mixed_precision: none}\n"
    )
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    code, out, err = run("distill", str(recipe), "loop.max_steps=3", "loop.batch_size=4")
    assert code == 0, err
    best = out.strip().splitlines()[-1]
    code, out, err = run("generate", "w1 w2", "--target", target, "--draft", best, "--max-new-tokens", "6")
    assert code == 0 and "acceptance length" in err


def test_a_wrong_override_is_one_line(run):
    code, _, err = run("distill", "quickstart", "optimizer.lrr=1")
    assert code == 2 and "did you mean" in err and "Traceback" not in err


def test_benchmark_verify_of_no_node_is_refused(run):
    code, _, err = run("benchmark", "verify", "--shape", "tiny", "--nodes", "0")
    assert code == 2 and "nodes is 0; expected 1 or more" in err


def test_benchmark_verify_writes_its_rows(run, tmp_path):
    code, out, _ = run(
        *("benchmark", "verify", "--shape", "tiny", "--nodes", "1,5", "--dtypes", "float32", "--repeats", "2"),
        *("--context", "9", "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")),
    )
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert code == 0 and "unrolled" in out and (tmp_path / "b.png").stat().st_size > 1000
    assert {row["method"] for row in rows} == {"autoregressive", "chain", "tree", "state_per_node", "unrolled"}
    kept = {row["method"]: row["kept_bytes"] for row in rows if row["nodes"] == 5}
    assert 0 < kept["tree"] < kept["state_per_node"] and kept["tree"] < kept["unrolled"]
    assert all(row["ms"] > 0 and row["ratio_to_autoregressive"] > 0 and row["peak_mib"] > 0 for row in rows)
    for wrong, named in (("--shape huge", "smollm2"), ("--dtypes foo", "no dtype 'foo'"), ("--nodes 1,x", "whole")):
        code, _, err = run("benchmark", "verify", *wrong.split())
        assert code == 2 and named in err
    assert run("benchmark", "verify", "--repeats", "0")[0] == 2


def test_benchmark_decode_prints_a_table_for_each_set_and_temperature(folders, run, tmp_path):
    target, draft = folders
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"turns": [name]}) + "\n")
    sets = [argument for name in ("one", "two") for argument in ("--prompts", str(tmp_path / f"{name}.jsonl"))]
    arguments = ["benchmark", "decode", "--target", target, "--draft", draft, *sets, "--max-new-tokens", "5"]
    code, out, _ = run(*arguments, "--strategies", "chain-2,sampled-2x2,stree", "--json", str(tmp_path / "d.json"))
    assert code == 0 and out.count("transformers") >= 4 and "best tree" in out
    found = json.loads((tmp_path / "d.json").read_text())
    assert [(t["prompts"], t["temperature"]) for t in found["tables"]] == [
        (n, t) for n in ("one", "two") for t in (0, 1)
    ]
    assert {row["num_identical"] for row in found["tables"][0]["rows"]} == {1}
    assert found["settings"]["versions"].keys() >= {"torch", "transformers"}
    for wrong, named in (("--dtypes foo", "no dtype 'foo'"), ("--strategies stre", "did you mean 'stree'"),
                         ("--temperatures x", "numbers"), ("--strategies plan", "draftwood plan")):  # fmt: skip
        code, _, err = run(*arguments, *wrong.split())
        assert code == 2 and named in err
    assert run(*arguments, "--repeats", "0")[0] == 2
