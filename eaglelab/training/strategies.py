"""How the work is spread over processes, beyond what Lightning's own strategies do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from hydra.utils import get_class
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig
from torch.distributed.device_mesh import init_device_mesh

from eaglelab.drafters import DraftNetwork
from eaglelab.drafters.sharding import NetworkShards, sharded_state, whole
from eaglelab.variants import DraftingModule
from eaglelab.variants.base import Shards


def shards_target(trainer: DictConfig) -> bool:
    """Whether a configured trainer spreads the target's layers over its processes."""
    strategy = trainer.get("strategy")
    name = strategy.get("_target_") if isinstance(strategy, DictConfig) else None
    return name is not None and getattr(get_class(name), "shards_target", False)


def require_no_scaler(precision: Any) -> None:
    """Raises ValueError for fp16: processes that hold parts of a gradient would not agree on its scale."""
    if getattr(precision, "scaler", None) is not None:
        raise ValueError(
            "trainer.precision=16-mixed scales gradients, and every process would scale its share by itself; use "
            "trainer.precision=bf16-mixed, trainer=ddp, or with trainer=fsdp trainer.strategy.shard_drafter=false"
        )


class SpreadStrategy(DDPStrategy):
    """A training whose drafter, or its optimizer's state, may be spread over the processes.

    Attributes:
        drafter_shards: this process's share, from the start of a training on; None: every process has all of it.
    """

    drafter_shards: Shards | None = None

    def setup(self, trainer: L.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING or self.drafter_shards is None:
            super().setup(trainer)
            return
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)  # a validation after the training: all is spread and the same already
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    @property
    def drafting_module(self) -> DraftingModule:
        assert isinstance(self.lightning_module, DraftingModule)
        return self.lightning_module

    def same_network(self) -> DraftNetwork:
        """The drafter, with the first process's weights in all of them.

        Raises:
            ValueError: fp16.
        """
        require_no_scaler(self.precision_plugin)
        network = self.drafting_module.network
        for tensor in (*network.parameters(), *network.buffers()):
            torch.distributed.broadcast(tensor.detach(), 0)
        return network


class ShardedStrategy(SpreadStrategy):
    """The batch, the frozen target's layers and the drafter spread over all processes (FSDP2).

    Each layer of the target is gathered while it runs (:meth:`~eaglelab.target.FrozenTarget.shard`). The drafter is
    gathered once per optimizer step (:mod:`eaglelab.drafters.sharding`); its optimizer state is never whole anywhere.
    Checkpoints are: one file of the same form as without sharding, so that any number of processes continues a run.

    Lightning's own ``ModelParallelStrategy`` is not used: it reads and writes an optimizer's state by parameter name,
    in a form of its own, and gathers by pass.

    Args:
        shard_drafter: False replicates the drafter, as with ``ddp``.
        settings: of :class:`~lightning.pytorch.strategies.DDPStrategy`.
    """

    shards_target = True

    drafter_shards: NetworkShards | None = None

    def __init__(self, shard_drafter: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.shard_drafter = shard_drafter

    def configure_ddp(self) -> None:
        if not self.shard_drafter:
            super().configure_ddp()
            return
        network = self.same_network()
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        self.drafter_shards = NetworkShards(network, mesh)

    # --- checkpoints ------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole, on the first process; empty on the others."""
        return self._on_first(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole, on the first process; empty on the others."""
        return self._on_first(super().optimizer_state(optimizer))

    def _on_first(self, state: dict[str, Any]) -> dict[str, Any]:
        if self.drafter_shards is None:
            return state
        found = {name: whole(value) for name, value in state.items()}
        return found if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.drafter_shards is not None:
            states = zip(checkpoint["optimizer_states"], self.optimizers, strict=True)
            checkpoint = {**checkpoint, "optimizer_states": [sharded_state(*one) for one in states]}
        super().load_optimizer_state_dict(checkpoint)
