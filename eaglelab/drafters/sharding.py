"""A drafter whose weights and optimizer state are spread over processes (FSDP2).

A drafter is one layer, and a step makes several passes over it, forwards and backwards, with chunks and steps computed
again in between. Gathering and reducing by pass would move the weights many times per step for nothing: memory peaks
inside a pass, where the one layer is whole anyhow. So the weights are gathered once per optimizer step and the
gradients reduced once; what stays spread are the fp32 weights in between and the optimizer state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from eaglelab.drafters.network import DraftNetwork


class NetworkShards:
    """This process's share of a drafter's weights; the network itself changes between whole and sharded.

    Args:
        network: on its device and the same in all processes; sharded from now on.
        mesh: one-dimensional, over all processes.
    """

    clips = False

    def __init__(self, network: DraftNetwork, mesh: Any) -> None:
        self.network = network
        self._sharded = fully_shard(network, mesh=mesh, reshard_after_forward=False)
        self._sharded.set_requires_gradient_sync(False)
        self._sharded.set_reshard_after_backward(False)

    def gather(self) -> None:
        """Make the network whole, for any number of passes; all processes together. Free where it is whole already."""
        self._sharded.unshard()

    def reduce_gradients(self) -> None:
        """Average the gradients of the whole network over the processes and leave each its share, the network sharded.

        A parameter without a gradient here counts as zeros. All processes together, once per optimizer step.
        """
        gradients = [_take_gradient(parameter) for parameter in self.network.parameters()]
        self._sharded.reshard()
        for parameter, gradient in zip(self.network.parameters(), gradients, strict=True):
            if gradient is not None:
                assert isinstance(parameter, DTensor)
                summed = DTensor.from_local(gradient, parameter.device_mesh, [Partial()])
                parameter.grad = summed.redistribute(placements=parameter.placements) / parameter.device_mesh.size()


def _take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient, no longer held by ``parameter``; None for a frozen one."""
    gradient, parameter.grad = parameter.grad, None
    if not parameter.requires_grad:
        return None
    return torch.zeros_like(parameter) if gradient is None else gradient


def whole(value: Any) -> Any:
    """``value`` with every sharded tensor in it whole and on the CPU; all processes together."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().cpu()
    if isinstance(value, dict):
        return {name: whole(part) for name, part in value.items()}
    return [whole(part) for part in value] if isinstance(value, list) else value


def sharded_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A whole optimizer state as one of ``optimizer``, over sharded parameters; no communication.

    Args:
        state: a state dict, the same in all processes.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of_number = dict(zip(numbers, parameters, strict=True))

    def share(value: Any, parameter: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != parameter.shape or not isinstance(parameter, DTensor):
            return value  # a step count
        value = value.to(parameter.device)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)

    entries = {
        number: {name: share(value, of_number[number]) for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return state | {"state": entries}
