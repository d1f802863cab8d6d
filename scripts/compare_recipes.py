"""EAGLE, HASS with and without Top-K, and HASS with the acceptance loss, compared at equal supervised rows.

    python scripts/compare_recipes.py quickstart --seeds 3 --epochs 2 --prompts 40 [section.field=value ...]

Run again after an interruption it goes on where it was. More seeds or recipes later are added to what is there.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from draftwood.configs.load import load_config
from draftwood.train.loop import Stopped
from draftwood.train.recipes import RECIPES, compare_recipes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a shipped recipe's name or a YAML file: target, data, optimizer, schedule")
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="default: %(default)s; others against the first")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--train-tokens", type=int, help="default: the configuration's")
    parser.add_argument("--prompts", type=int, help="default: the configuration's")
    parser.add_argument("--trees", default="chain-4,dynamic-8", help="default: %(default)s")
    asked = parser.parse_intermixed_args()
    given = {"data.train_tokens": asked.train_tokens, "evaluate.num_prompts": asked.prompts}
    changes = ["stages=[]", f"loop.epochs={asked.epochs}", *(f"{k}={v}" for k, v in given.items() if v is not None)]
    config = load_config(asked.config, [*changes, *asked.overrides])
    try:
        comparison = compare_recipes(config, range(asked.seeds), asked.recipes.split(","), asked.trees.split(","))
    except Stopped as stop:
        sys.exit(str(stop))
    console = Console()
    console.print(comparison.table())
    console.print(f"written: {comparison.save(Path(config.output) / f'{config.name}-recipes')}", soft_wrap=True)


if __name__ == "__main__":
    main()
