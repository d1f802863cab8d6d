"""The whole pipeline in order, on real weights and real conversations: `make quickstart`.

    python scripts/run_quickstart.py [section.field=value ...]

Target and data are fetched once into the cache folder. Run again after an interruption it goes on where it was.
"""

import sys
import time
from pathlib import Path

from rich.console import Console

from draftwood.configs.load import load_config
from draftwood.decode.compare import compare_drafts
from draftwood.decode.console import answer
from draftwood.decode.screen import open_screen
from draftwood.models.checkpoint import load_draft, save_draft
from draftwood.models.target import load_target
from draftwood.train.loop import Stopped, distill
from draftwood.train.setup import build_draft, held_out_prompts, load_split, prepare_rows

QUESTION = "Give me three tips for staying healthy."


def main() -> None:
    config = load_config("quickstart", sys.argv[1:])
    folder, tree = Path(config.output) / config.name, config.evaluate.tree
    console, started = Console(), time.perf_counter()

    console.rule("1 of 4: target and data")
    target = load_target(config.target.name, config.target.dtype, config.target.device)
    rows = prepare_rows(config, target.tokenizer)

    console.rule("2 of 4: distil a draft")
    untrained = save_draft(build_draft(config, target, load_split(config, rows, "train")), folder / "untrained")
    try:
        trained = distill(config, target, console)
    except Stopped as stop:
        sys.exit(str(stop))

    console.rule("3 of 4: measure it before and after, on held-out prompts")
    drafts = {"untrained": load_draft(untrained, target), "trained": load_draft(trained, target)}
    comparison = compare_drafts(target, drafts, held_out_prompts(config, rows), config.evaluate, folder, console)

    console.rule("4 of 4: decode with it")
    console.print(QUESTION, style="bold")
    screen = open_screen()
    reply = answer(target, drafts["trained"], QUESTION, screen, tree=tree, max_new_tokens=128)
    screen.end()
    console.print(f"{reply.summary}\n")
    console.print(comparison.table())
    console.print(f"written: {comparison.save(folder)}; {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
