"""One process of a launched group: runs every list of overrides in a JSON file, one after the other.

A first entry `stop-rank-1@3` has rank 1 alone asked to stop in its third step. A line of JSON for each run says how it
ended, how many numbers the process holds of the draft's weights and of its optimizers' moments, how often in each step
it has reduced gradients and gone backward, and whether it is the one that prepared the rows.
"""

import json
import os
import signal
import sys
from pathlib import Path

from torch import distributed
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from draftwood.configs.load import load_config
from draftwood.train import loop, prepare

train_step, write_rows, reduce_shares = loop._train_step, prepare._write, _fsdp_param_group.foreach_reduce
seen = {}


def preparing(*arguments):
    seen["has_prepared"] = True
    write_rows(*arguments)


def counting_shares(*arguments, **options):
    seen["reductions"][-1] += 1  # the draft is one group
    return reduce_shares(*arguments, **options)


def counting(run, numbers, position, meter):
    seen["reductions"].append(0)
    seen["backwards"].append(0)
    backward = type(run.accelerator).backward

    def counting_backward(loss):
        seen["backwards"][-1] += 1
        if isinstance(run.model, DistributedDataParallel):
            seen["reductions"][-1] += run.model.require_backward_grad_sync
        backward(run.accelerator, loss)

    run.accelerator.backward = counting_backward
    norm = train_step(run, numbers, position, meter)
    members = [optimizer for optimizer, _ in run.course.optimizers.members]
    moments = [value for member in members for state in member.state.values() for value in state.values()]
    tensors = [*run.module.parameters(), *(value for value in moments if value.ndim)]
    seen["num_held"] = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)
    return norm


def stop_rank_1_at(step):
    def stepping(run, numbers, position, meter):
        if position.step + 1 == step and run.accelerator.process_index == 1:
            signal.raise_signal(signal.SIGINT)
        return counting(run, numbers, position, meter)

    return stepping


prepare._write, _fsdp_param_group.foreach_reduce = preparing, counting_shares
plan = Path(sys.argv[1])
for overrides in json.loads(plan.read_text()):
    seen.update(num_held=0, reductions=[], backwards=[], has_prepared=False)
    stopping = overrides[0].startswith("stop-rank-1@")
    loop._train_step = stop_rank_1_at(int(overrides.pop(0).partition("@")[2])) if stopping else counting
    try:
        loop.distill(load_config(None, overrides))
    except loop.Stopped:
        outcome = "stopped"
    else:
        outcome = "finished"
    with plan.with_suffix(f".rank{os.environ['RANK']}").open("a") as file:
        file.write(json.dumps({"outcome": f"{outcome} of {os.environ['WORLD_SIZE']}", **seen}) + "\n")
# Together: a process that still listens to one that has gone may abort.
distributed.barrier()
distributed.destroy_process_group()
