"""What a run can be told: one strict model per concern, defaults included.

A YAML file names one run and holds only what differs from these defaults; `section.field=value` overrides either.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator


class Section(BaseModel):
    """Frozen, no unknown keys, no conversion between types other than int to float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TargetConfig(Section):
    name: str = "smollm2-hybrid"  # built-in asset, local folder or hub id
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs where there are any


_OPTIONS = {
    "eagle": ("num_layers", "fusion_bias", "norms"),
    "eagle3": ("taps",),
    "mamba": ("num_layers", "fusion_bias", "norms", "state_dim"),
    "medusa": ("num_heads",),
}


class DraftConfig(Section):
    kind: Literal["eagle", "eagle3", "mamba", "medusa"] = "eagle"
    num_layers: int = Field(1, ge=1)
    fusion_bias: bool = False
    norms: Literal["none", "input", "all"] = "all"  # none: as EAGLE; input: the fusion's; all: first layer, output too
    state_dim: int = Field(64, ge=1)  # of a mamba draft's recurrent state
    taps: tuple[int, ...] | None = None  # layers whose inputs an eagle3 draft reads; None: a low, a middle, a high one
    num_heads: int = Field(4, ge=1)  # tokens ahead that medusa heads predict; align.steps trains as many
    draft_vocab_size: int | None = Field(None, ge=16)  # None: the target's own vocabulary
    init_from: str | None = None  # folder of a draft checkpoint to start from

    @model_validator(mode="after")
    def _no_option_of_another_kind(self) -> "DraftConfig":
        for name in ("num_layers", "fusion_bias", "norms", "state_dim", "taps", "num_heads"):
            is_changed = getattr(self, name) != type(self).model_fields[name].default
            if is_changed and name not in _OPTIONS[self.kind]:
                raise ValueError(f"draft.{name} is not an option of draft.kind {self.kind}; leave it out")
        return self


class SourceConfig(Section):
    """Conversations to train on: a file, a folder saved by `datasets`, a hub id, or a built-in asset's name."""

    path: str = Field(min_length=1)
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)  # share of its conversations; above 1 they are repeated
    split: str | None = None  # of a data set; None: its only one, else train

    @classmethod
    def parse(cls, text: str) -> "SourceConfig":
        """`path`, `path:weight`, `path#split` or `path#split:weight`.

        Raises:
            ValueError: a weight that is not above 0.
        """
        path, split, weight = re.fullmatch(r"(.*?)(?:#([\w.-]+))?(?::([-+\d.eE]+))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
        try:
            return cls(path=path, split=split, weight=float(weight or 1))
        except ValueError:
            raise ValueError(
                f"source {text!r}: expected path, path:weight or path#split:weight, a weight above 0"
            ) from None


def _as_sources(value: Any) -> Any:
    """One source or several, each as text or in full."""
    values = value if isinstance(value, list | tuple) else (value,)
    return tuple(SourceConfig.parse(one) if isinstance(one, str) else one for one in values)


class DataConfig(Section):
    source: Annotated[tuple[SourceConfig, ...], BeforeValidator(_as_sources), Field(min_length=1)] = (
        SourceConfig(path="sharegpt"),
    )  # or text, as on the command line: path, path:weight, path#split:weight; or a list of either
    folder: str | None = None  # where prepared rows are kept; None: inside the cache folder
    max_length: int = Field(2048, ge=8)
    min_length: int = Field(0, ge=0)  # shorter rows are dropped
    long_rows: Literal["clip", "drop"] = "clip"  # those above max_length
    num_validation: int = Field(200, ge=1)
    limit: int | None = Field(None, ge=1)  # conversations read from each source
    train_tokens: int | None = Field(None, ge=1)  # stop taking training rows at this many tokens
    system: Literal["keep", "fold", "drop"] = "keep"
    num_proc: int = Field(2, ge=1)


class FeaturesConfig(Section):
    source: Literal["cached", "online"] = "cached"
    folder: str | None = None  # None: inside the run's folder
    max_gb: float = Field(20.0, gt=0)
    tokens_per_batch: int = Field(4096, ge=1)


class AlignConfig(Section):
    steps: int = Field(3, ge=1, le=8)
    feature_weight: float = Field(1.0, ge=0)
    ce_weight: float = Field(0.1, ge=0)
    topk_weight: float = Field(1.0, ge=0)
    topk: int = Field(10, ge=1)
    acceptance_weight: float = Field(0.0, ge=0)  # of -log of the share of draft tokens that sampling would accept
    acceptance_eta: float | None = Field(None, gt=0)  # a number: KL, then more of the share itself as it grows (LK: 3)
    detach: bool = True  # own features carry no gradient into the align step that made them; false as EAGLE-3 trains
    step_weights: tuple[float, ...] | None = None  # None: every align step counts the same
    feature_noise: float = Field(0.2, ge=0)  # uniform, times 512 / T, on the input features only

    @model_validator(mode="after")
    def _one_weight_per_step(self) -> "AlignConfig":
        if self.step_weights is not None and len(self.step_weights) != self.steps:
            raise ValueError(f"step_weights has {len(self.step_weights)} entries, align.steps is {self.steps}")
        return self


class OptimizerConfig(Section):
    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(3e-5, gt=0)
    muon_lr: float = Field(0.02, gt=0)  # for matrices, with name: muon; everything else is AdamW at lr
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_ratio: float = Field(0.01, ge=0, le=1)
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    max_grad_norm: float = Field(0.5, gt=0)


class LoopConfig(Section):
    epochs: int = Field(1, ge=1)
    max_steps: int | None = Field(None, ge=1)  # optimizer steps; ends earlier than `epochs` would
    batch_size: int = Field(2, ge=1)  # rows per process and micro-step
    gradient_accumulation: int = Field(1, ge=1)
    mixed_precision: Literal["none", "bf16"] = "bf16"
    # rows of logits held at a time, target and align steps together (eagle3, with a head of its own: in each tensor of
    # them); None: fewer the larger the vocabulary
    rows_per_chunk: int | None = Field(None, ge=1)
    compile: bool = False  # passes over logits and the draft's layers through torch.compile; needs a C++ compiler
    log_every: int = Field(10, ge=1)
    evaluate_every: int | None = Field(None, ge=1)  # optimizer steps; None: at the end of each epoch
    decode_every: int | None = Field(None, ge=1)  # optimizer steps; decodes the prompts of `evaluate`
    save_every: int = Field(200, ge=1)
    keep: int = Field(2, ge=1)  # latest checkpoints kept, beside the best
    resume: bool = True
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    project: str = "draftwood"


class StageConfig(Section):
    """A part of a run, one after the other, and what is different in it from the sections above."""

    epochs: int | None = Field(None, ge=1)  # None: loop.epochs
    align: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}  # a stage that changes it starts a schedule and moments of its own


class EvaluateConfig(Section):
    prompts: str = "validation"  # "validation": held-out conversations; or a file of JSON Lines with `turns`
    num_prompts: int = Field(20, ge=1)
    max_new_tokens: int = Field(64, ge=1)
    max_prompt_tokens: int = Field(512, ge=1)
    tree: str = "dynamic"
    temperature: float = Field(0.0, ge=0)


class RunConfig(Section):
    name: str = "draft"
    output: str = "runs"  # checkpoints, logs and reports go to output/name
    seed: int = 0
    target: TargetConfig = TargetConfig()
    draft: DraftConfig = DraftConfig()
    data: DataConfig = DataConfig()
    features: FeaturesConfig = FeaturesConfig()
    align: AlignConfig = AlignConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig()
    stages: tuple[StageConfig, ...] = ()  # none: all of the run is one stage
    evaluate: EvaluateConfig = EvaluateConfig()

    @field_validator("name")
    @classmethod
    def _is_one_folder(cls, name: str) -> str:
        if not name.strip(". ") or {"/", "\\"} & set(name):
            raise ValueError("expected the name of a folder, without a path; `output` says where it is")
        return name

    @model_validator(mode="after")
    def _stages_fit(self) -> "RunConfig":
        self.stage_configs()
        if self.stages and self.loop.epochs != 1 and all(stage.epochs is not None for stage in self.stages):
            raise ValueError(f"loop.epochs is {self.loop.epochs}, but every stage has epochs of its own; leave it out")
        return self

    @model_validator(mode="after")
    def _every_head_is_trained(self) -> "RunConfig":
        heads, steps = self.draft.num_heads, max(stage.align.steps for stage in self.stage_configs())
        is_short = steps < heads and self.draft.init_from is None
        if self.draft.kind == "medusa" and (is_short or steps > heads):
            raise ValueError(
                f"align.steps is {steps}, but medusa has {heads} heads, of which an align step trains one; set "
                f"align.steps={heads} or draft.num_heads={steps}"
            )
        return self

    @model_validator(mode="after")
    def _no_feature_loss_without_features(self) -> "RunConfig":
        weight = max(stage.align.feature_weight for stage in self.stage_configs())
        if self.draft.kind == "eagle3" and weight:
            raise ValueError(
                f"align.feature_weight is {weight:g}, but an eagle3 draft predicts no features; set "
                "align.feature_weight=0"
            )
        return self

    def stage_configs(self) -> "tuple[RunConfig, ...]":
        """Of each stage this configuration with the stage's own `align`, `optimizer` and `loop.epochs`.

        Raises:
            ValueError: a stage with a key or value that its section does not know.
        """
        if not self.stages:
            return (self,)
        found = []
        for number, stage in enumerate(self.stages):
            own = {
                "align": _changed(self.align, stage.align, f"stages.{number}.align"),
                "optimizer": _changed(self.optimizer, stage.optimizer, f"stages.{number}.optimizer"),
                "loop": self.loop.model_copy(update={"epochs": stage.epochs or self.loop.epochs}),
            }
            found.append(self.model_copy(update={**own, "stages": ()}))
        return tuple(found)


_Model = TypeVar("_Model", AlignConfig, OptimizerConfig)


def _changed(section: _Model, changes: dict[str, Any], where: str) -> _Model:
    try:
        return type(section).model_validate(section.model_dump() | changes)
    except ValidationError as error:
        raise ValueError("; ".join(_mistake(where, details) for details in error.errors())) from None


def _mistake(where: str, details: Any) -> str:
    return f"{'.'.join([where, *map(str, details['loc'])])}: {details['msg']} (got {details['input']!r})"
