"""Weights, gradients and moments of the draft in shares, one on each process: FSDP, with torch's `fully_shard`.

It is asked for by accelerate's configuration (`distributed_type: FSDP`), and done here, so that it is the same on CPU
processes, where accelerate leaves its own FSDP aside. The draft is one group: its layers are called in parts, not
through the `forward` that would gather a group of their own. So weights and gradients are whole on every process within
a step, and in shares between steps, as the moments always are. Files hold whole tensors: a run goes on however it is
launched.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from draftwood.train.optim import Optimizers

# Of accelerate's fsdp_config, what this is; anything else there is refused rather than left aside.
_SETTINGS = {
    "version": "2",
    "auto_wrap_policy": "NO_WRAP",
    "reshard_after_forward": "false",
    "offload_params": "false",
    "activation_checkpointing": "false",
    "cpu_ram_efficient_loading": "false",
}


def is_sharded() -> bool:
    """Whether accelerate's configuration asks for FSDP; its launcher says so in the environment.

    Raises:
        ValueError: with settings that the draft is not sharded by.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return False
    for name, expected in _SETTINGS.items():
        found = os.environ.get(f"FSDP_{name.upper()}", expected)
        if found.lower() != expected.lower():
            raise ValueError(
                f"accelerate's configuration has fsdp_{name}: {found}, but a draft is sharded with {expected}; change "
                "it, or take the shipped configs/accelerate/fsdp.yaml"
            )
    return True


def parallel(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """`module` as the processes train it together: DistributedDataParallel around it, or itself sharded in place.

    To be called before optimizers are made: sharding replaces parameters. The weights are the same on every process
    already. A single process has nothing to share.
    """
    if not is_sharded():
        return accelerator.prepare_model(module)
    if accelerator.num_processes == 1:
        return module
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    fully_shard(module, mesh=mesh, reshard_after_forward=False)  # in place
    return module


def accumulating(accelerator: Accelerator, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    """Around a micro-step: the processes' gradients are averaged in the backward pass of the last one alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        return nullcontext()
    return nullcontext() if is_last else accelerator.no_sync(model)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """All processes enter and leave together; within, each calls the model without gradient as often as it likes."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def whole(value: Any) -> Any:
    """A sharded tensor's full one, the same on every process, all of which must ask; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """The module's state dict, its tensors whole. All processes take part."""
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


def whole_moments(optimizers: Optimizers) -> list[dict[str, Any]]:
    """The optimizers' state dicts, their tensors whole. All processes take part."""
    states = optimizers.state_dict()
    for state in states:
        state["state"] = {
            number: {name: whole(value) for name, value in of_parameter.items()}
            for number, of_parameter in state["state"].items()
        }
    return states


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Whole `weights` into a module that may be sharded; every process takes its share, without communication."""
    own = module.state_dict()
    module.load_state_dict({name: _like(own.get(name), tensor) for name, tensor in weights.items()})


def load_moments(optimizers: Optimizers, states: list[dict[str, Any]]) -> None:
    """What `whole_moments` gave into optimizers whose parameters may be sharded."""
    optimizers.load_state_dict(states)
    for optimizer, _ in optimizers.members:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = _like(parameter, value)


def _like(example: Tensor | None, tensor: Tensor) -> Tensor:
    """`tensor` in shares like those of `example`; each process has all of it, so that none sends anything."""
    if not isinstance(example, DTensor):
        return tensor
    on_device = tensor.to(example.device)
    return distribute_tensor(on_device, example.device_mesh, example.placements, src_data_rank=None)
