"""`loop.compile`: what of a training step goes through `torch.compile` besides the loss, and whether it can here.

Compiled are the parts that are many small passes over memory: a decoder layer before and after its attention. The
attention itself is another program for each align step and block of rows, and stays as it is.
"""

import os
import shutil
import sys

import torch

from draftwood.models.draft_attention import AttentionDraft
from draftwood.models.draft_base import Draft


def check_compiler(device: torch.device) -> None:
    """Raises:
    ValueError: `device` is a CPU and there is no C++ compiler, without which nothing can be compiled for it.
    """
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(name) is None:
        raise ValueError(
            f"loop.compile (--compile) needs a C++ compiler for a CPU, and {name} is not on the PATH: install one "
            "(Debian: apt install g++), set CXX to the name of another, or leave the switch out"
        )


def compile_layers(draft: Draft) -> None:
    """Compiles the decoder layers of an attention draft, for any batch size and length; others stay as they are."""
    if not isinstance(draft, AttentionDraft):
        return
    for layer in draft.decoder_layers:
        for name in ("queries_keys_values", "finish"):
            setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True))
