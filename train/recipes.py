"""Training recipes compared at equal cost: same rows, epochs, optimizer and schedule, several seeds, real decoding.

    python scripts/compare_recipes.py quickstart --seeds 3 --prompts 40

Every run in <output>/<name>-recipes is one of `RECIPES` with one seed, which draws the draft's first weights and the
order of the rows; all share rows, features and draft vocabulary. Started again, what is finished is kept.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from draftwood.configs.schema import AlignConfig, RunConfig
from draftwood.decode.evaluate import describe_machine, evaluate
from draftwood.decode.propose import resolve_tree
from draftwood.models.checkpoint import load_draft
from draftwood.models.target import Target
from draftwood.train import setup
from draftwood.train.checkpoints import provenance
from draftwood.train.fingerprint import file_sha256
from draftwood.train.loop import train, validate
from draftwood.train.run import Run, assemble
from draftwood.train.tracking import StopRequest

# What each changes in the `align` section. The acceptance loss stands in for the cross-entropy, as published.
RECIPES: dict[str, dict[str, Any]] = {
    "eagle": {"steps": 1, "topk_weight": 0.0},
    "hass-no-topk": {"steps": 3, "topk_weight": 0.0},
    "hass": {"steps": 3},
    "hass-acceptance": {
        "steps": 3,
        "topk_weight": 0.0,
        "ce_weight": 0.0,
        "acceptance_weight": 1.0,
        "acceptance_eta": 3.0,
    },
}
_MEASURED_STEPS = 3
_RESAMPLES = 10_000
INTERVAL = (
    "95 %, percentile bootstrap that draws seeds and prompts anew at once, each with replacement: the mean over the "
    "drawn seeds of emitted tokens / target forwards over the drawn prompts. Seed i begins from the same weights and "
    "order of rows in every recipe, so a difference is of the same drawn seeds and prompts. Over few seeds it is too "
    "narrow: it understates the variance between them by a factor of (seeds - 1) / seeds"
)


@dataclass(frozen=True)
class RecipeComparison:
    """What was measured.

    Attributes:
        counts: by tree [recipes, seeds, prompts, 2] of emitted tokens and target forwards.
        validation: by recipe and seed, the metrics of three align steps on the validation rows.
        settings: what the figures depend on.
    """

    recipes: list[str]
    seeds: list[int]
    counts: dict[str, np.ndarray]
    validation: dict[str, list[dict[str, Any]]]
    settings: dict[str, Any]

    def figures(self) -> list[dict[str, Any]]:
        """One entry for each recipe and tree."""
        found = []
        for tree, counts in self.counts.items():
            values, drawn = bootstrap(counts)
            for i, recipe in enumerate(self.recipes):
                metrics = self.validation[recipe]
                found.append(
                    {
                        "recipe": recipe,
                        "tree": tree,
                        "acceptance_length_by_seed": values[i].tolist(),
                        "acceptance_length": float(values[i].mean()),
                        "interval": _interval(drawn[:, i]),
                        "difference": float(values[i].mean() - values[0].mean()),
                        "difference_interval": _interval(drawn[:, i] - drawn[:, 0]),
                        "estimated_acceptance_length": float(np.mean([m["acceptance_length"] for m in metrics])),
                        "top1": np.mean([[a["top1"] for a in m["align"]] for m in metrics], 0).tolist(),
                    }
                )
        return sorted(found, key=lambda f: self.recipes.index(f["recipe"]))

    def table(self) -> Table:
        against = f"minus {self.recipes[0]}, 95 %"
        heads = ("recipe", "tree", "by seed", "acceptance length, 95 %", against, "estimated", "top-1 by align step")
        table = Table(*heads, caption=INTERVAL)
        for f in self.figures():
            low, high = f["difference_interval"]
            table.add_row(
                f["recipe"],
                f["tree"],
                " ".join(f"{value:.3f}" for value in f["acceptance_length_by_seed"]),
                f"{f['acceptance_length']:.3f} ({f['interval'][0]:.3f} to {f['interval'][1]:.3f})",
                "" if f["recipe"] == self.recipes[0] else f"{f['difference']:+.3f} ({low:+.3f} to {high:+.3f})",
                f"{f['estimated_acceptance_length']:.3f}",
                " ".join(f"{value:.3f}" for value in f["top1"]),
            )
        return table

    def save(self, folder: Path) -> Path:
        """Writes `recipes.json`: the figures of the table, every run's validation, the counts and the settings."""
        path = folder / "recipes.json"
        counts = {tree: dict(zip(self.recipes, c.tolist(), strict=True)) for tree, c in self.counts.items()}
        whole = {"figures": self.figures(), "interval": INTERVAL, "seeds": self.seeds, "validation": self.validation}
        text = json.dumps({**whole, "settings": self.settings, "emitted_and_forwards": counts}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
        return path


def compare_recipes(
    config: RunConfig,
    seeds: Sequence[int],
    recipes: Sequence[str] = tuple(RECIPES),
    trees: Sequence[str] = ("chain-4",),
    target: Target | None = None,
    console: Console | None = None,
) -> RecipeComparison:
    """Trains `recipes` on the target and data of `config`, each with every seed, and decodes held-out prompts greedily.

    Args:
        config: its `stages` are left out and its `align` section is each recipe's base; `loop.epochs` counts for all.
        trees: every draft decodes with each.

    Raises:
        Stopped: asked to stop; the same call goes on.
        ValueError: a recipe that is not one of `RECIPES`, an unknown tree, or several processes.
    """
    for tree in trees:
        resolve_tree(tree)
    if unknown := [name for name in recipes if name not in RECIPES]:
        raise ValueError(f"no recipe {', '.join(unknown)}; known: {', '.join(RECIPES)}")
    setup.check_machine(config)
    console = console or Console(stderr=True)
    folder = Path(config.output) / f"{config.name}-recipes"
    data_folder = setup.prepare_rows(config, None if target is None else target.tokenizer)
    accelerator = setup.start_processes(config, folder)
    if accelerator.num_processes > 1:
        raise ValueError("recipes are compared in one process; start it without a launcher")
    target = target or setup.load_for_training(config, accelerator.device)
    splits = setup.load_splits(config, target, data_folder, folder, accelerator, console)
    prompts = setup.held_out_prompts(config, data_folder)
    evaluated = config.evaluate

    def run_of(recipe: str, seed: int, init_from: str | None = None) -> Run:
        run_config = recipe_config(config, recipe, seed, folder, init_from)
        return assemble(run_config, target, data_folder, accelerator, console, *splits)

    counts: dict[str, list[list[Any]]] = {tree: [[] for _ in recipes] for tree in trees}
    validation: dict[str, list[dict[str, Any]]] = {name: [] for name in recipes}
    for seed in seeds:  # so that all recipes have as many seeds, wherever it is stopped
        for i, recipe in enumerate(recipes):
            run = run_of(recipe, seed)
            with StopRequest() as stop:
                train(run, stop)
            trained = str(run.checkpoints.latest())
            validation[recipe].append(validate(run_of("hass", seed, trained)).to_dict())
            for tree in trees:
                report = evaluate(
                    target,
                    load_draft(trained, target),  # type: ignore[arg-type]
                    prompts,
                    tree=tree,
                    max_new_tokens=evaluated.max_new_tokens,
                    baseline=False,
                    journal=run.folder / f"decode-{tree}.jsonl",
                    identity=file_sha256(Path(trained) / "draft.safetensors"),
                )
                counts[tree][i].append([(prompt.emitted, prompt.forwards) for prompt in report.prompts])
    configs = {name: recipe_config(config, name, seeds[0], folder).align.model_dump() for name in recipes}
    settings = {
        **provenance(config),
        **describe_machine(target),
        "align": configs,
        "epochs": config.loop.epochs,
        "rows": len(splits[0].rows),
        "supervised_rows": int(splits[0].sizes.supervised.sum()) * config.loop.epochs,
        "prompts": len(prompts.prompts),
        "temperature": 0.0,
    }
    return RecipeComparison(
        list(recipes), list(seeds), {t: np.array(c) for t, c in counts.items()}, validation, settings
    )


def recipe_config(config: RunConfig, recipe: str, seed: int, folder: Path, init_from: str | None = None) -> RunConfig:
    """`config` in one stage with the `align` section of `recipe`, as the run `<recipe>-<seed>` in `folder`."""
    align = AlignConfig.model_validate(config.align.model_dump() | {"step_weights": None} | RECIPES[recipe])
    changes: Mapping[str, Any] = {
        "name": f"{recipe}-{seed}",
        "output": str(folder),
        "seed": seed,
        "align": align,
        "stages": (),
        "draft": config.draft.model_copy(update={"init_from": init_from or config.draft.init_from}),
    }
    return config.model_copy(update=changes)


def bootstrap(counts: np.ndarray, resamples: int = _RESAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance lengths [recipes, seeds], and their means over drawn seeds and prompts [resamples, recipes].

    Args:
        counts: [recipes, seeds, prompts, 2] of emitted tokens and target forwards.
    """
    _, num_seeds, num_prompts, _ = counts.shape
    random = np.random.default_rng(0)
    seeds = random.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), resamples)
    prompts = random.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), resamples)
    emitted, forwards = np.moveaxis(np.einsum("np,rspc->nrsc", prompts, counts.astype(float)), -1, 0)
    drawn = np.einsum("ns,nrs->nr", seeds, emitted / forwards) / num_seeds
    totals = counts.sum(2)
    return totals[..., 0] / totals[..., 1], drawn


def _interval(values: np.ndarray) -> list[float]:
    return np.percentile(values, [2.5, 97.5]).tolist()
