"""Every kind of draft goes all the way: trained by a config, saved, loaded, decoding without a change of output."""

import json

import pytest
import tiny
import tiny_run
import torch

import draftwood as dw
from draftwood.configs.load import ConfigError
from draftwood.train.loop import distill

RUNS = {
    "eagle": [],
    "mamba": ["draft.state_dim=8", "align.detach=false"],
    "eagle3": [
        "align.detach=false",
        "align.feature_weight=0",
        "align.ce_weight=1",
        "align.topk_weight=0",
        "align.step_weights=[1,0.8,0.64]",
        "draft.draft_vocab_size=40",
    ],
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workshop")
    tiny_run.make(folder, family="bamba")
    return folder


@pytest.mark.parametrize(
    ("kind", "source"), [("eagle", "cached"), ("mamba", "cached"), ("eagle3", "cached"), ("eagle3", "online")]
)
def test_a_draft_is_trained_saved_and_decodes_without_changing_the_output(kind, source, workshop, tmp_path):
    target = dw.load_target(str(workshop / "target"))
    overrides = [
        f"output={tmp_path}",
        f"draft.kind={kind}",
        "loop.max_steps=3",
        f"features.source={source}",
        *RUNS[kind],
    ]
    best = distill(tiny_run.config(workshop, *overrides), target)
    fresh = dw.load_target(str(workshop / "target"))
    draft = dw.load_draft(best, fresh)
    assert draft.kind == kind
    prompt = tiny.prompt_ids((2, 7), 3)
    alone = dw.generate(fresh, None, prompt, max_new_tokens=16)
    drafted = dw.generate(fresh, draft, prompt, max_new_tokens=16, tree="dynamic-12")
    assert drafted.tokens == alone.tokens


def test_a_trained_eagle3_head_moves(workshop, tmp_path):
    target = dw.load_target(str(workshop / "target"))
    config = tiny_run.config(workshop, f"output={tmp_path}", "draft.kind=eagle3", "loop.max_steps=2", *RUNS["eagle3"])
    draft = dw.load_draft(distill(config, target), target)
    start = target.head_weight[draft.draft_vocab]
    assert not torch.allclose(draft.head_weight, start)
    assert "lm_head.weight" in draft.state_dict() and draft.head_weight.shape == (40, 32)


def test_a_feature_loss_without_features_is_refused(workshop):
    with pytest.raises(ConfigError, match="set align.feature_weight=0"):
        tiny_run.config(workshop, "draft.kind=eagle3")
    with pytest.raises(ConfigError, match=r"align.feature_weight is 0.5, .* set align.feature_weight=0"):
        stages = "stages=[{}, {align: {feature_weight: 0.5}}]"
        tiny_run.config(workshop, "draft.kind=eagle3", "align.feature_weight=0", stages)


def test_a_draft_that_is_gone_on_with_reads_the_layers_that_it_was_trained_on(workshop, tmp_path):
    settings = (f"output={tmp_path}", "draft.kind=eagle3", "loop.max_steps=1", *RUNS["eagle3"])
    first = distill(tiny_run.config(workshop, "name=first", "draft.taps=[0,1]", *settings))
    distill(tiny_run.config(workshop, "name=second", f"draft.init_from={first}", *settings))
    index = tmp_path / "second" / "features" / "train" / "index.json"
    assert json.loads(index.read_text())["taps"] == [0, 1]


def test_an_option_of_another_kind_is_refused(workshop):
    with pytest.raises(ConfigError, match="draft.state_dim is not an option of draft.kind eagle"):
        tiny_run.config(workshop, "draft.state_dim=32")
    with pytest.raises(ConfigError, match="draft.norms is not an option of draft.kind eagle3"):
        tiny_run.config(workshop, "draft.kind=eagle3", "draft.norms=none")


def test_a_head_of_its_own_is_bound_to_its_vocabulary(workshop, tmp_path):
    target = dw.load_target(str(workshop / "target"))
    settings = (f"output={tmp_path}", "draft.kind=eagle3", "loop.max_steps=1", *RUNS["eagle3"])
    first = distill(tiny_run.config(workshop, "name=first", *settings), target)
    config = tiny_run.config(workshop, *settings, f"draft.init_from={first}", "draft.draft_vocab_size=48")
    with pytest.raises(ValueError, match="draft_vocab_size is 48, .* has 40; set draft.draft_vocab_size=40"):
        distill(config, target)
    with pytest.raises(ValueError, match="of kind eagle3 is its own"):
        dw.load_draft(first, target).take_vocab(torch.arange(48))
