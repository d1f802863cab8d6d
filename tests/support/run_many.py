"""One process of a launched group: runs every list of overrides in a JSON file, one after the other.

A first entry `stop-rank-1@3` has rank 1 alone asked to stop in its third step. Beside each outcome it notes how many
numbers the process holds of the draft's weights and of its optimizers' moments.
"""

import json
import os
import signal
import sys
from pathlib import Path

from torch.distributed.tensor import DTensor

from draftwood.configs.load import load_config
from draftwood.train import loop

train_step = loop._train_step
num_held = 0


def counting(run, numbers, position, meter):
    global num_held
    norm = train_step(run, numbers, position, meter)
    members = [optimizer for optimizer, _ in run.course.optimizers.members]
    moments = [value for member in members for state in member.state.values() for value in state.values()]
    tensors = [*run.module.parameters(), *(value for value in moments if value.ndim)]
    num_held = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)
    return norm


def stop_rank_1_at(step):
    def stepping(run, numbers, position, meter):
        if position.step + 1 == step and run.accelerator.process_index == 1:
            signal.raise_signal(signal.SIGINT)
        return counting(run, numbers, position, meter)

    return stepping


plan = Path(sys.argv[1])
for overrides in json.loads(plan.read_text()):
    stopping = overrides[0].startswith("stop-rank-1@")
    loop._train_step = stop_rank_1_at(int(overrides.pop(0).partition("@")[2])) if stopping else counting
    try:
        loop.distill(load_config(None, overrides))
    except loop.Stopped:
        outcome = "stopped"
    else:
        outcome = "finished"
    with plan.with_suffix(f".rank{os.environ['RANK']}").open("a") as file:
        file.write(f"{outcome} of {os.environ['WORLD_SIZE']}, holding {num_held}\n")
