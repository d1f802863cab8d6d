import json
import subprocess
import sys

import pytest
import tiny_chat
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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tree", "egle-25"], "did you mean 'eagle-25'"),
        (["--draft", "nowhere"], "nowhere"),
        (["--top-p", "0.5"], "temperature 0"),
        (["--dtype", "float31"], "float31"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, folders, run):
    code, out, err = run("generate", "x", "--target", folders[0], *arguments)
    line = next(line for line in err.splitlines() if line.startswith("draftwood: "))
    assert code == 2 and out == "" and message in line and "Traceback" not in err
