"""What comes with the package can be read by this version and is small."""

import json

import pytest
from safetensors import safe_open

from draftwood.decode.planner import Planning
from draftwood.decode.propose.plan import Plan, load_plan, plan_file, plans_of
from draftwood.models.assets import ASSETS, CACHE_VARIABLE, shipped_path
from draftwood.models.checkpoint import FORMAT, draft_folder, notes_folder, weights_sha256
from draftwood.models.draft_kinds import KINDS
from draftwood.models.mixer_file import MIXERS, load_mixers
from draftwood.models.tree import Tree

DRAFTS = sorted(path.parent.name for path in shipped_path("").glob("*/draft.json"))


@pytest.mark.parametrize("name", DRAFTS)
def test_a_shipped_draft_is_of_a_built_in_target_and_a_kind_this_version_reads(name):
    folder = draft_folder(name)
    description = json.loads((folder / "draft.json").read_text(encoding="utf-8"))
    assert description["format"] == FORMAT and description["target"]["name"] in ASSETS
    KINDS[description["kind"]].config_type.from_dict(description["config"])
    with safe_open(folder / "draft.safetensors", "pt") as weights:
        assert "draft_vocab" in set(weights.keys())


@pytest.mark.parametrize("name", DRAFTS)
def test_a_shipped_draft_says_how_it_was_made_and_names_no_machine(name):
    description = (draft_folder(name) / "draft.json").read_text(encoding="utf-8")
    assert {"config", "versions", "step"} <= json.loads(description)["provenance"].keys()
    assert "/tmp" not in description and "/root" not in description and "/home" not in description


CERTIFIED = sorted(path.parent.name for path in shipped_path("").glob("*/certificate.json"))


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_certificate_is_that_of_the_weights_beside_it(name):
    certificate = json.loads((draft_folder(name) / "certificate.json").read_text(encoding="utf-8"))
    assert certificate["passed"] and certificate["subject"]["draft"] == name
    assert certificate["subject"]["draft_sha256"] == weights_sha256(name)


def test_the_report_of_the_hybrids_draft_has_a_planned_tree_for_each_set_of_prompts():
    report = json.loads((draft_folder("smollm2-hybrid-hass") / "report.json").read_text(encoding="utf-8"))
    assert [table["prompts"] for table in report["tables"]] == ["mt_bench", "humaneval", "gsm8k"]
    for table in report["tables"]:
        (planned,) = (row for row in table["rows"] if row["strategy"] == "plan")
        assert planned["acceptance_length"] > 2.4 and planned["ratio"] > 1.3


@pytest.mark.parametrize("name", DRAFTS)
def test_a_shipped_draft_has_at_most_16_mib(name):
    assert sum(path.stat().st_size for path in draft_folder(name).iterdir()) < 16 * 2**20


def test_a_folder_of_that_name_comes_first_where_a_draft_is_in_it(tmp_path, monkeypatch):
    assert DRAFTS
    monkeypatch.chdir(tmp_path)
    (tmp_path / DRAFTS[0]).mkdir()
    assert draft_folder(DRAFTS[0]).is_absolute()
    (tmp_path / DRAFTS[0] / "draft.json").touch()
    assert not draft_folder(DRAFTS[0]).is_absolute()


def test_a_file_of_that_name_hides_no_shipped_draft(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / DRAFTS[0]).touch()
    assert draft_folder(DRAFTS[0]) == shipped_path(DRAFTS[0])


def test_the_plan_of_a_shipped_draft_is_kept_in_the_cache_and_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    details = {"costs_ms": {"spread": 1.0}, "speedup_on_other_prompts": 1.3}
    planning = Planning(
        {"float32": Plan(Tree.chain(2), 2.0, 3.0, 2.0, (1.0, 2.0), details)},
        {"draft_sha256": weights_sha256(DRAFTS[0])},
    )
    planning.save(plan_file(DRAFTS[0]))
    assert load_plan(DRAFTS[0], "float32").tree.num_nodes == 3 and plans_of(DRAFTS[0], ["float32"])
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    Planning(planning.plans, {}).save(plan_file(DRAFTS[0]))
    with pytest.raises(ValueError, match="a plan for other weights than those of"):
        plans_of(DRAFTS[0], ["float32"])


def test_the_notes_of_a_users_draft_are_kept_beside_it(tmp_path):
    (tmp_path / "draft.json").touch()
    assert notes_folder(tmp_path) == tmp_path == notes_folder(f"model:{tmp_path}")


HYBRIDS = sorted(path.parent.name for path in shipped_path("").glob(f"*/{MIXERS}"))


@pytest.mark.parametrize("name", HYBRIDS)
def test_shipped_mixers_are_whole_small_and_say_how_they_were_made(name):
    folder = shipped_path(name)
    record = json.loads((folder / "hybrid.json").read_text(encoding="utf-8"))
    assert name in ASSETS and set(load_mixers(folder / MIXERS)) == set(record["layers"])
    assert {"recipe", "source", "versions", "held_out", "packed"} <= record.keys()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 32 * 2**20
    assert all(word not in json.dumps(record) for word in ("/tmp", "/root", "/home"))
