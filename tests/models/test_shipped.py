"""What comes with the package can be read by this version and is small."""

import json

import pytest
from safetensors import safe_open

from draftwood.models.assets import ASSETS, shipped_path
from draftwood.models.checkpoint import FORMAT, draft_folder
from draftwood.models.draft_kinds import KINDS
from draftwood.models.mixer_file import MIXERS, load_mixers

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


@pytest.mark.parametrize("name", DRAFTS)
def test_a_shipped_draft_has_at_most_16_mib(name):
    assert sum(path.stat().st_size for path in draft_folder(name).iterdir()) < 16 * 2**20


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    assert DRAFTS
    monkeypatch.chdir(tmp_path)
    (tmp_path / DRAFTS[0]).mkdir()
    assert not draft_folder(DRAFTS[0]).is_absolute()


HYBRIDS = sorted(path.parent.name for path in shipped_path("").glob(f"*/{MIXERS}"))


@pytest.mark.parametrize("name", HYBRIDS)
def test_shipped_mixers_are_whole_small_and_say_how_they_were_made(name):
    folder = shipped_path(name)
    record = json.loads((folder / "hybrid.json").read_text(encoding="utf-8"))
    assert name in ASSETS and set(load_mixers(folder / MIXERS)) == set(record["layers"])
    assert {"recipe", "source", "versions", "held_out", "packed"} <= record.keys()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 32 * 2**20
    assert all(word not in json.dumps(record) for word in ("/tmp", "/root", "/home"))
