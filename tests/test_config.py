"""Configuration: every recipe loads, and every mistake is named."""

import pytest

from draftwood.configs.load import ConfigError, load_config, recipe_names, resolve


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_by_name_and_by_path(name):
    from draftwood.configs import load

    config = load_config(name)
    assert config == load_config(load.RECIPES / f"{name}.yaml")
    assert resolve(config.model_dump(mode="json")) == config, "what a checkpoint keeps must load again"


def test_there_are_recipes():
    assert {"quickstart", "hass", "eagle"} <= set(recipe_names())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimzer.lr=1", "unknown key 'optimzer'; did you mean 'optimizer'"),
        ("optimizer.lrr=1", r"unknown key 'optimizer.lrr'; did you mean 'optimizer\.(lr|muon_lr)'"),
        ("lr=1", r"unknown key 'lr'; did you mean 'optimizer\.lr'"),
        ("align.steps=true", "align.steps: .*valid integer .*True"),
        ("loop.epochs=1.5", "loop.epochs: .*valid integer .*1.5"),
        ("loop.resume=1", "loop.resume: .*valid boolean"),
        ("align.steps=0", "align.steps: .*greater than or equal to 1"),
        ("optimizer.name=sgd", "optimizer.name: .*'adamw' or 'muon'"),
        ("align=3", "'align' is a section, got 3"),
        ("align.step_weights=[1,2]", "step_weights has 2 entries, align.steps is 3"),
        ("draft.kind=medusa", "align.steps is 3, but medusa has 4 heads, .* align.steps=4 or draft.num_heads=3"),
        ("name=../elsewhere", "name: .*name of a folder, without a path"),
        ("name=..", "name: .*name of a folder"),
        ("target.name", "override 'target.name': expected section.field=value"),
        ("data.source=[", r"override 'data\.source=\[': the value is not YAML: [^\n]*\Z"),
        ("target.name.x=1", "'name' is not a section"),
        ("stages.0.align.stps=1", r"stages\.0\.align\.stps: Extra inputs"),
        ("stages.1.align={steps: 9}", r"stages\.1\.align\.steps: .*less than or equal to 8 \(got 9\)"),
        ("stages.2.epochs=1", "expected a number below 2 instead of '2'"),
        ("stages.epochs=1", r"expected stages\.<number>\.field=value"),
        ("stages.0=1", r"expected stages\.<number>\.field=value"),
        ("loop.epochs=3", "loop.epochs is 3, but every stage has epochs of its own"),
    ],
)
def test_a_mistake_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", [override])


@pytest.mark.parametrize("text", ["3e-4", "0.0003", "3.0e-4"])
def test_numbers_may_be_written_as_people_write_them(text, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"optimizer:\n  lr: {text}\n")
    assert load_config(file).optimizer.lr == load_config(None, [f"optimizer.lr={text}"]).optimizer.lr == 3e-4


def test_overrides_win_over_the_file_and_an_int_may_stand_for_a_float(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optimizer:\n  lr: 1\nalign:\n  steps: 2\n")
    config = load_config(file, ["align.steps=4", "align.step_weights=[1, 0.8, 0.64, 0.512]"])
    assert config.optimizer.lr == 1.0 and config.align.steps == 4
    assert config.align.step_weights == (1.0, 0.8, 0.64, 0.512)


def test_medusa_heads_may_be_trained_in_one_of_several_stages_or_before():
    stages = ["draft.kind=medusa", "stages=[{align: {steps: 2}}, {align: {steps: 4}}]"]
    assert len(load_config("quickstart", stages).stage_configs()) == 2
    assert load_config("quickstart", ["draft.kind=medusa", "draft.init_from=somewhere"]).align.steps == 3
    with pytest.raises(ConfigError, match="align.steps is 5, but medusa has 4 heads"):
        load_config("medusa", ["align.steps=5", "align.step_weights=null"])


def test_hass_is_its_published_two_stages_and_a_stage_can_be_overridden():
    first, second = load_config("hass").stage_configs()
    assert (first.loop.epochs, first.align.topk_weight, first.optimizer.lr) == (40, 0.0, 3e-5)
    assert (second.loop.epochs, second.align.topk_weight, second.optimizer.lr) == (10, 1.0, 1e-5)
    assert first.align.steps == second.align.steps == 3
    shorter = load_config("hass", ["stages.1.epochs=2", "align.topk=5"]).stage_configs()
    assert [(c.loop.epochs, c.align.topk) for c in shorter] == [(40, 5), (2, 5)]
    (only,) = load_config("hass", ["stages=[]", "loop.epochs=3"]).stage_configs()
    assert only.loop.epochs == 3 and only.align.topk_weight == 1.0


def test_eagle3_trains_through_seven_steps_that_count_less_and_less():
    config = load_config("eagle3")
    assert config.draft.kind == "eagle3" and not config.align.detach
    assert config.align.step_weights == pytest.approx([0.8**i for i in range(config.align.steps)])


def test_files_that_are_not_configurations_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no recipe 'quikstart'; shipped: .*quickstart"):
        load_config("quikstart")
    with pytest.raises(ConfigError, match="nothere.yaml: no such file"):
        load_config(tmp_path / "nothere.yaml")
    file = tmp_path / "list.yaml"
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected a mapping of sections, found list"):
        load_config(file)
    file.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(file)
