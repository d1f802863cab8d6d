"""Packs the mixers of a hybrid into the small file that the package brings, and measures what is left of it.

    python scripts/pack_hybrid.py runs/smollm2-hybrid models/shipped/smollm2-hybrid --rows ROWS

HYBRID is a folder that `draftwood hybridize` wrote, ROWS the folder of prepared rows it was trained on.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoModelForCausalLM

from draftwood.models.hybrid import build_hybrid
from draftwood.models.mixer_file import MIXERS, load_mixers, save_mixers
from draftwood.models.target import load_target
from draftwood.train.hybrid_stages import measure
from draftwood.train.prepare import load_rows
from draftwood.train.token_blocks import TokenBlocks


def main(
    hybrid: Annotated[Path, typer.Argument(help="Folder that `draftwood hybridize` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder for the packed mixers.")],
    rows: Annotated[Path, typer.Option(help="Prepared rows the hybrid was trained on.")],
) -> None:
    record = json.loads((hybrid / "hybrid.json").read_text())
    state = AutoModelForCausalLM.from_pretrained(hybrid).state_dict()
    prefixes = {layer: f"model.layers.{layer}.mamba." for layer in record["layers"]}
    mixers = {
        layer: {name.removeprefix(prefix): w for name, w in state.items() if name.startswith(prefix)}
        for layer, prefix in prefixes.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    save_mixers(mixers, out / MIXERS)

    original = load_target(record["made_from"], dtype="float32", device="cpu").model
    recipe = record["recipe"]
    held_out = TokenBlocks(load_rows(rows, "validation"), recipe["length"], recipe["seed"])
    blocks = held_out.batch(0, min(record["held_out"]["blocks"], len(held_out)))
    found = measure(original, build_hybrid(original, load_mixers(out / MIXERS)), blocks)
    size = (out / MIXERS).stat().st_size
    record["packed"] = {"bytes": size, "kl_nats": found.kl, "top1_agreement": found.top1}
    (out / "hybrid.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"{out / MIXERS}: {size / 1e6:.1f} MB, KL {found.kl:.4f} nats, top-1 agreement {found.top1:.2%}")


if __name__ == "__main__":
    typer.run(main)
