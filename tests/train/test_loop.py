import json
import signal
from dataclasses import replace
from functools import partial

import pytest
import tiny
import tiny_run
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import log_of

from draftwood.kernels.distill_loss import DistillHead
from draftwood.models.checkpoint import load_draft
from draftwood.models.target import load_target
from draftwood.train import loop, setup
from draftwood.train.batches import RowSizes, collate
from draftwood.train.checkpoints import Checkpoints
from draftwood.train.features import FeatureError, FeatureSource
from draftwood.train.launch import main
from draftwood.train.loop import ResumeError, Stopped, distill
from draftwood.train.losses import Distillation
from draftwood.train.prepare import load_rows
from draftwood.train.recipes import compare_recipes
from draftwood.train.rows import supervised_rows
from draftwood.train.run import set_up
from draftwood.train.setup import build_draft, load_split, loss_weights
from draftwood.train.summary import dry_run


@pytest.fixture(scope="module")
def finished(workshop, target, tmp_path_factory):
    """The configuration of a run of 6 steps that is done."""
    config = tiny_run.config(workshop, f"output={tmp_path_factory.mktemp('runs')}", "loop.epochs=1")
    distill(config, target)
    return config


@pytest.fixture
def make_config(workshop, tmp_path):
    """Configurations of runs in a folder of this test, on the workshop's target and rows."""
    return lambda *overrides: tiny_run.config(workshop, f"output={tmp_path}", *overrides)


def weights(path):
    return load_file(path / "draft.safetensors")


def last_checkpoint(config):
    return Checkpoints(loop.Path(config.output) / config.name, 1).latest()


def provenance_of(folder):
    return json.loads((folder / "draft.json").read_text())["provenance"]


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def kill_after(monkeypatch, step, how):
    """`how()` is called once optimizer step number `step` is taken."""
    train_step = loop._train_step

    def stepping(run, numbers, position, meter):
        norm = train_step(run, numbers, position, meter)
        if position.step + 1 == step:
            how()
        return norm

    monkeypatch.setattr(loop, "_train_step", stepping)


def test_a_run_learns_and_leaves_a_draft_that_loads(make_config, target):
    config = make_config("loop.epochs=8", "loop.evaluate_every=12", "align.feature_noise=0.0")
    best = distill(config, target)
    draft = load_draft(best, target)
    assert draft.draft_vocab is None
    losses = [record["loss"] for record in log_of(config)]
    assert len(losses) == 48
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    validations = log_of(config, "validation")
    assert [record["step"] for record in validations] == [12, 24, 36, 48]
    assert all(len(record["align"]) == 3 for record in validations)


@pytest.mark.parametrize(
    ("killed_at", "optimizer"),
    [
        (3, "adamw"),
        (6, "muon"),  # where an epoch ends
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(3, "muon"), (6, "adamw"), (7, "adamw"), (7, "muon")]
        ),
    ],
)
def test_killed_and_resumed_is_bit_for_bit_an_uninterrupted_run(make_config, target, monkeypatch, killed_at, optimizer):
    """Killed before, at and after the end of an epoch, with a checkpoint every 2 steps."""
    options = ["loop.save_every=2", f"optimizer.name={optimizer}", "loop.log_every=4"]
    whole = make_config("name=whole", *options)
    distill(whole, target)
    killed = make_config("name=killed", *options)

    def die():
        raise MemoryError

    with monkeypatch.context() as patch:
        kill_after(patch, killed_at, die)
        with pytest.raises(MemoryError):
            distill(killed, target)
    assert last_checkpoint(killed).name == f"step-{(killed_at - 1) // 2 * 2:08d}"
    torch.manual_seed(12345)
    distill(killed, target)
    assert_same_weights(weights(last_checkpoint(killed)), weights(last_checkpoint(whole)))
    states = [torch.load(last_checkpoint(c) / "training.pt", weights_only=True) for c in (whole, killed)]
    assert states[0]["position"] == states[1]["position"]
    for kind in ("train", "validation"):
        records = [[(r["step"], r["loss"], r["num_rows"]) for r in log_of(c, kind)] for c in (whole, killed)]
        assert records[0] == records[1]


def test_asked_to_stop_it_saves_and_the_same_command_goes_on(make_config, target, monkeypatch):
    config, before = make_config(), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        kill_after(patch, 4, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Stopped, match="Run the same command"):
            distill(config, target)
    assert last_checkpoint(config).name == "step-00000004"
    assert signal.getsignal(signal.SIGINT) is before
    distill(config, target)
    assert [record["step"] for record in log_of(config)] == list(range(1, 13))


def test_a_finished_run_started_again_trains_nothing(make_config, target, monkeypatch):
    config = make_config()
    best = distill(config, target)
    before = weights(best)
    monkeypatch.setattr(loop, "_train_step", None)
    assert distill(config, target) == best
    assert_same_weights(before, weights(best))


def test_only_the_latest_checkpoints_and_the_best_draft_stay(make_config, target):
    config = make_config("loop.save_every=2", "loop.keep=3", "loop.evaluate_every=1")
    folder = loop.Path(config.output) / config.name
    (folder / "checkpoints" / ".partial-step-00000004").mkdir(parents=True)  # of a process that was killed
    best = distill(config, target)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000008",
        "step-00000010",
        "step-00000012",
    ]
    assert best == folder / "best" and not list(folder.glob(".*"))
    chosen = provenance_of(best)
    records = {record["step"]: record["acceptance_length"] for record in log_of(config, "validation")}
    assert chosen["validation"]["acceptance_length"] == records[chosen["step"]] == max(records.values())


def test_a_run_shorter_than_an_interval_still_saves_and_validates(make_config, target):
    config = make_config("loop.max_steps=1", "loop.log_every=50")
    assert (distill(config, target) / "draft.safetensors").exists()
    assert last_checkpoint(config).name == "step-00000001"
    assert [record["step"] for record in log_of(config)] == [1]


def test_a_checkpoint_holds_the_draft_alone_and_how_it_came_about(make_config, target):
    config = make_config("draft.draft_vocab_size=40", "loop.max_steps=2")
    best = distill(config, target)
    held = weights(last_checkpoint(config))
    assert sum(t.numel() for name, t in held.items() if name != "draft_vocab") == sum(
        p.numel() for p in load_draft(best, target).parameters()
    )
    assert all(t.shape != target.head_weight.shape for t in held.values())
    provenance = provenance_of(best)
    assert provenance["config"] == config.model_dump(mode="json")
    assert {"git", "versions", "argv", "time", "step", "validation"} <= provenance.keys()
    assert provenance["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("size", ["40", "null"])
def test_a_checkpoint_names_its_rows_and_what_of_their_replies_a_reduced_vocabulary_covers(
    make_config, target, workshop, size
):
    """Also of other rows than those that the vocabulary was chosen from."""
    first = make_config("name=first", f"draft.draft_vocab_size={size}", "loop.max_steps=1")
    fewer = (f"draft.init_from={distill(first, target)}", "name=second", "data.train_tokens=60")
    second = make_config(*fewer, f"draft.draft_vocab_size={size}", "loop.max_steps=1")
    distill(second, target)
    found = []
    for config in (first, second):
        rows = load_split(config, workshop / "data", "train")
        draft_vocab = load_draft(last_checkpoint(config), target).draft_vocab
        for folder in (last_checkpoint(config), last_checkpoint(config).parents[1] / "best"):
            facts = provenance_of(folder)
            assert facts["rows"] == RowSizes.of(rows).digest
            if size == "null":
                assert "draft_vocab" not in facts
            else:
                said = [id in draft_vocab for row in rows for id in row["input_ids"][row["loss_mask"] > 0]]
                assert facts["draft_vocab"] == {"size": 40, "coverage": sum(said) / len(said)}
        found.append(facts)
    assert found[0]["rows"] != found[1]["rows"]
    assert size == "null" or found[0]["draft_vocab"] != found[1]["draft_vocab"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.lr=0.5", "optimizer: "),
        ("seed=1", "rows: .*; seed: 0 -> 1"),
        ("data.max_length=30", "rows: "),
        ("draft.norms=none", "draft: "),
        ("align.topk=3", "align: "),
        ("stages=[{align: {topk: 3}}]", "stages: "),
        ("loop.mixed_precision=bf16", "mixed_precision: none -> bf16"),
        ("loop.epochs=3", "total_steps: 6 -> 18"),
        ("loop.batch_size=3", "global_batch_size: 4 -> 3"),
        ("loop.resume=false", "set loop.resume=true"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(finished, target, workshop, tmp_path, change, message):
    changes = [f"output={finished.output}", "loop.epochs=1", f"features.folder={tmp_path}", change]
    if change.startswith(("seed", "data")):
        changes.append(f"data.folder={workshop}/{change}")
    with pytest.raises(ResumeError, match=message):
        distill(tiny_run.config(workshop, *changes), target)


def test_a_checkpoint_of_another_target_of_the_same_shape_is_refused(finished, workshop):
    other = load_target(str(workshop / "target"))
    other.final_norm.weight.data[0] += 1
    with pytest.raises(ResumeError, match="target: "):
        distill(finished, other)


def test_other_rows_in_a_shared_feature_folder_are_refused(make_config, target, tmp_path):
    distill(make_config("loop.max_steps=1", f"features.folder={tmp_path}/shared"), target)
    with pytest.raises(FeatureError, match="another rows"):
        distill(make_config("name=b", f"features.folder={tmp_path}/shared", "data.train_tokens=100"), target)


@pytest.mark.parametrize("options", [("features.source=online",), ("features.max_gb=0.00003",)])
def test_where_features_come_from_changes_nothing_but_their_rounding(make_config, target, options):
    losses = []
    for name, extra in (("cached", ()), ("other", options)):
        config = make_config(f"name={name}", *extra)
        distill(config, target)
        losses.append(torch.tensor([record["loss"] for record in log_of(config)]))
    torch.testing.assert_close(losses[0], losses[1], rtol=5e-3, atol=0)
    assert not torch.equal(losses[0], losses[1])


def test_accumulation_gives_the_losses_of_one_large_batch(make_config, target):
    losses = []
    for batch_size, accumulation in ((4, 1), (1, 4), (3, 2), (2, 2)):
        config = make_config(
            f"name=b{batch_size}", f"loop.batch_size={batch_size}", f"loop.gradient_accumulation={accumulation}"
        )
        distill(config, target)
        if batch_size * accumulation == 4:
            losses.append(torch.tensor([record["loss"] for record in log_of(config)]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-4, atol=0)


def test_a_step_follows_the_mean_gradient_over_the_supervised_rows_of_its_global_batch(make_config, target, workshop):
    options = ["loop.max_steps=1", "features.source=online", "align.feature_noise=0.0", "loop.gradient_accumulation=6"]
    config = make_config(*options)
    distill(config, target)
    rows = load_rows(workshop / "data", "train")
    draft = build_draft(config, target, rows)
    head = DistillHead.build(target.head_weight)
    numbers = list(range(len(rows)))
    source = FeatureSource(target, rows, head)
    batch = collate(numbers, rows, source(numbers), target.hidden_dim, target.device)
    num_rows = sum(int(supervised_rows(torch.tensor(row["loss_mask"])).sum()) for row in rows)
    Distillation(draft, head, loss_weights(config), 3)(batch, num_rows).loss.backward()
    expected = torch.cat([p.grad.flatten() for p in draft.parameters()]).norm().item()
    assert log_of(config)[0]["grad_norm"] == pytest.approx(expected, rel=1e-4)


def test_an_epoch_has_batches_and_noise_of_its_own(make_config, target, monkeypatch):
    epochs = {"batches": [], "noise": []}

    def batches(lengths, size, seed, epoch, make=loop.global_batches):
        epochs["batches"].append(epoch)
        return make(lengths, size, seed, epoch)

    def noise(batch, amount, seed, epoch, add=loop.add_noise):
        epochs["noise"].append(epoch)
        return add(batch, amount, seed, epoch)

    monkeypatch.setattr(loop, "global_batches", batches)
    monkeypatch.setattr(loop, "add_noise", noise)
    config = make_config("loop.max_steps=8")
    distill(config, target)
    assert epochs == {"batches": [0] * 6 + [1] * 2, "noise": [0] * 6 + [1] * 2}


def test_a_line_of_the_log_is_of_the_rows_since_the_one_before(make_config, target):
    each, both = (make_config(f"name=every-{n}", "loop.max_steps=6", f"loop.log_every={n}") for n in (1, 2))
    for config in (each, both):
        distill(config, target)
    single, double = ([record["num_rows"] for record in log_of(config)] for config in (each, both))
    assert double == [a + b for a, b in zip(single[::2], single[1::2], strict=True)]


def test_a_stage_takes_its_own_align_steps_and_validation_always_takes_all(make_config, target):
    stages = "stages=[{align: {steps: 1, step_weights: [1.0]}}, {}]"
    config = make_config(stages, "loop.epochs=1", "loop.evaluate_every=3", "align.step_weights=[1.0, 0.8, 0.6]")
    distill(config, target)
    assert [len(record["align"]) for record in log_of(config)] == [1] * 6 + [3] * 6
    assert [len(record["align"]) for record in log_of(config, "validation")] == [3] * 4


def test_a_run_goes_on_from_a_draft(make_config, target):
    first = distill(make_config("name=first"), target)
    config = make_config("name=second", f"draft.init_from={first}", "loop.max_steps=1", "optimizer.lr=1e-9")
    second = distill(config, target)
    for name, tensor in weights(first).items():
        torch.testing.assert_close(weights(second)[name], tensor, atol=1e-7, rtol=0)


def test_a_run_goes_on_with_a_vocabulary_of_another_size(make_config, workshop, target):
    first = distill(make_config("name=first", "draft.draft_vocab_size=40"), target)
    rest = (f"draft.init_from={first}", "loop.max_steps=1", "optimizer.lr=1e-9")
    config = make_config("name=second", "draft.draft_vocab_size=56", *rest)
    second = load_draft(distill(config, target), target)
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for row in load_rows(workshop / "data", "train"):
        counts += torch.bincount(
            torch.tensor(row["input_ids"])[torch.tensor(row["loss_mask"]) > 0], minlength=len(counts)
        )
    frequent = counts.sort(descending=True, stable=True).indices[:56].sort().values
    assert torch.equal(second.draft_vocab, frequent) and len(load_draft(first, target).draft_vocab) == 40
    torch.testing.assert_close(second.head_weight, target.head_weight[frequent])
    with pytest.raises(ValueError, match="draft_vocab_size is None.*set draft.draft_vocab_size=40"):
        distill(make_config("name=third", *rest), target)


def test_bf16_autocast_trains_float32_weights_close_to_float32_losses(make_config, target):
    losses = []
    for precision in ("none", "bf16"):
        config = make_config(f"name={precision}", f"loop.mixed_precision={precision}")
        distill(config, target)
        losses.append(torch.tensor([record["loss"] for record in log_of(config)]))
        assert all(t.dtype == torch.float32 for t in weights(last_checkpoint(config)).values())
    torch.testing.assert_close(losses[0], losses[1], rtol=3e-2, atol=0)


def test_wandb_works_offline_and_without_a_key(make_config, target, monkeypatch, tmp_path):
    for variable in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    distill(make_config("loop.max_steps=1", "loop.tracker=wandb"), target)
    assert list(tmp_path.glob("wandb/offline-run-*"))


@pytest.mark.parametrize("begin", [distill, dry_run, partial(compare_recipes, seeds=[0])])
def test_what_is_not_installed_is_named_before_rows_are_prepared(begin, make_config, target, monkeypatch):
    monkeypatch.setattr(setup, "prepare_rows", lambda *_: pytest.fail("rows were prepared"))
    monkeypatch.setattr("draftwood.train.tracking.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        begin(make_config("loop.tracker=tensorboard"), target=target)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no-such-compiler is not on the PATH"):
        begin(make_config("loop.compile=true"), target=target)


@pytest.mark.parametrize("begin", [distill, dry_run])
def test_a_draft_that_does_not_fit_is_named_before_features_are_computed(
    begin, make_config, finished, target, monkeypatch, tmp_path
):
    monkeypatch.setattr(setup, "open_cache", lambda *_, **__: pytest.fail("features were computed"))
    monkeypatch.setattr(setup, "FeatureSource", lambda *_, **__: pytest.fail("features were computed"))
    best = Checkpoints(loop.Path(finished.output) / finished.name, 1).best
    with pytest.raises(FileNotFoundError, match="nowhere: no draft.json"):
        begin(make_config(f"draft.init_from={tmp_path}/nowhere"), target)
    with pytest.raises(ValueError, match="has the same shape but another head"):
        begin(make_config(f"draft.init_from={best}"), load_target(tiny.build("llama", seed=1)))
    with pytest.raises(ValueError, match="draft.norms is none, but the draft in draft.init_from"):
        begin(make_config(f"draft.init_from={best}", "draft.norms=none"), target)
    with pytest.raises(ValueError, match=f"draft_vocab_size is {tiny.VOCAB}, the target has {tiny.VOCAB} tokens"):
        begin(make_config(f"draft.draft_vocab_size={tiny.VOCAB}"), target)


def test_rows_with_tokens_that_the_target_lacks_are_named(tmp_path):
    tiny_run.make(tmp_path)
    tokenizer = tiny_run.tokenizer()
    tokenizer.add_tokens(["surplus"])
    tokenizer.save_pretrained(tmp_path / "target")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"value": "w', '"value": "surplus w', 1))
    with pytest.raises(ValueError, match=f"hold token {tiny.VOCAB}, but the target's vocabulary has {tiny.VOCAB}"):
        distill(tiny_run.config(tmp_path))


def test_the_command_line_takes_overrides_and_prints_the_drafts_folder(workshop, tmp_path, capsys):
    main([*tiny_run.overrides_for(workshop), f"output={tmp_path}", "loop.max_steps=1", "name=by-hand"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "by-hand" / "best")


def test_rows_without_a_supervised_token_give_zero_loss_and_a_zero_gradient_for_every_weight(make_config, target):
    """As a process may have them while others train: the reduction waits for a gradient of each weight."""
    run = set_up(make_config(), target, Console(stderr=True))
    batch = loop._load(run, run.train, [0, 1])
    out = run.model(replace(batch, supervised=torch.zeros_like(batch.supervised)), 7)
    out.loss.backward()
    assert out.loss == 0
    for name, parameter in run.module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    meter = run.meter()
    meter.add(out, replace(batch, supervised=torch.zeros_like(batch.supervised)))
    assert not meter.sums.any()
