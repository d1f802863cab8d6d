"""The command line of a training process."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from torch import distributed

from draftwood.configs.load import load_config
from draftwood.train.loop import Stopped, distill
from draftwood.train.summary import dry_run


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses, trains, says where the draft is. Asked to stop it ends with exit code 0 once a checkpoint is saved."""
    parser = argparse.ArgumentParser(prog="draftwood.train", description="Distil a draft from a frozen target.")
    parser.add_argument("--config", help="a shipped recipe's name or a YAML file; all defaults without it")
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; train and write nothing")
    parsed = parser.parse_intermixed_args(arguments)
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_first else logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        config = load_config(parsed.config, parsed.overrides)
        if parsed.dry_run:
            return dry_run(config)
        best = distill(config)
    except Stopped as stop:
        if is_first:
            print(stop, file=sys.stderr)
    else:
        if is_first:
            print(best)
    finally:
        if distributed.is_initialized():  # else a process that still listens to one that has gone may abort
            distributed.destroy_process_group()


def run() -> None:
    """`main` as a process of its own: a mistake of the caller is one line on the standard error and exit code 2."""
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        print(f"draftwood.train: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("draftwood.train: interrupted; the latest checkpoint stays", file=sys.stderr)
        raise SystemExit(130) from None
