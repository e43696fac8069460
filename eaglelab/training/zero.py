"""DeepSpeed's ZeRO-1 for the drafter: its optimizer state, and the fp32 weights behind it, spread over the processes.

Lightning's own ``DeepSpeedStrategy`` is not used: it runs on CUDA only, saves a folder that nothing but DeepSpeed
reads, and has the engine count micro-batches, while the drafters make several backward passes in each. Here the passes
are plain ones, the engine reduces the gradients once per optimizer step, and checkpoints are those of every trainer.

ZeRO-2 reduces in every backward pass, and ZeRO-3 gathers in every forward pass: up to seven times per step, for a
network of one layer.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from eaglelab.training.strategies import SpreadStrategy
from eaglelab.variants import OptimConfig

log = logging.getLogger(__name__)

_INSTEAD = "trainer=fsdp spreads target and drafter without DeepSpeed"


class ZeroStrategy(SpreadStrategy):
    """The batch spread over all processes, and the drafter's optimizer state by DeepSpeed (ZeRO stage 1).

    Args:
        zero_optimization: settings of DeepSpeed's section of that name, such as ``reduce_bucket_size``.
        settings: of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ValueError: DeepSpeed is not installed, or another stage is asked for.
    """

    drafter_shards: ZeroShards | None = None

    def __init__(self, zero_optimization: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError(f"trainer=deepspeed needs DeepSpeed: pip install deepspeed; or {_INSTEAD}")
        self._zero = {"stage": 1, "overlap_comm": False} | dict(zero_optimization or {})
        if self._zero["stage"] != 1:
            raise ValueError(
                f"trainer.strategy.zero_optimization.stage={self._zero['stage']}: drafters train with stage 1, the "
                f"others move gradients or weights in every pass; {_INSTEAD}"
            )

    @staticmethod
    def require(optim: OptimConfig) -> None:
        """Raises ValueError for a recipe that DeepSpeed cannot follow."""
        if optim.name != "adamw":
            raise ValueError(
                f"optim.name={optim.name} needs whole matrices, and DeepSpeed cuts them up; set optim.name=adamw, or "
                f"use trainer=fsdp"
            )
        if optim.clip_value is not None:
            raise ValueError(
                f"DeepSpeed clips gradients by their norm alone; set optim.clip_value=null optim.clip_norm=0.5, say, "
                f"instead of optim.clip_value={optim.clip_value}, or use trainer=fsdp"
            )

    def configure_ddp(self) -> None:
        self.require(self.drafting_module.optim)
        self.same_network()

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        deepspeed = _deepspeed_for(self.root_device)
        module, (optimizer,) = self.drafting_module, self.optimizers
        config = {
            "train_micro_batch_size_per_gpu": 1,  # asked for, and read by nothing that is used here
            "gradient_accumulation_steps": 1,
            "gradient_clipping": module.optim.clip_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": self._zero,
        }
        trained = [p for p in module.network.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=module.network, model_parameters=trained, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.drafter_shards = ZeroShards(engine, optimizer, trained)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        assert self.drafter_shards is not None
        step: Any = _Step(self.drafter_shards.engine)
        return self.precision_plugin.optimizer_step(step, model=self.drafting_module, closure=closure, **kwargs)

    # --- checkpoints ------------------------------------------------------------------------

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole, in the form that one process writes; all processes together."""
        assert self.drafter_shards is not None
        state = self.drafter_shards.whole_state()
        return state if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.drafter_shards is not None
        self.drafter_shards.load_whole_state(checkpoint["optimizer_states"][0])


class _Step:
    """An optimizer to Lightning: what the closure calls first, then the engine's step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self, closure: Callable[[], Any]) -> Any:
        result = closure()
        self._engine.step()
        return result


class ZeroShards:
    """This process's share of the optimizer state.

    Args:
        engine: DeepSpeed's.
        optimizer: the AdamW that the engine drives, now over one flat share per group.
        trained: the parameters, in the optimizer's order.
    """

    clips = True
    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter]) -> None:
        self.engine, self._optimizer, self._trained = engine, optimizer, trained

    def gather(self) -> None:
        """Nothing to do: with stage 1 the weights are whole between steps."""

    def reduce_gradients(self) -> None:
        """Average the gradients of all passes over the processes, once; the engine keeps and clips this one's share."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients()

    def whole_state(self) -> dict[str, Any]:
        """The optimizer's state dict as without DeepSpeed; all processes together."""
        from deepspeed.utils import safe_get_full_optimizer_state

        step = next((state["step"] for state in self._optimizer.state.values()), None)
        state: dict[int, Any] = {}
        if step is not None:
            for number, parameter in enumerate(self._trained):
                moments = {name: safe_get_full_optimizer_state(parameter, name).cpu() for name in self.MOMENTS}
                state[number] = {"step": step.detach().cpu().clone(), **moments}
        (group,) = self._optimizer.param_groups
        return {"state": state, "param_groups": [group | {"params": list(range(len(self._trained)))}]}

    def load_whole_state(self, whole: Mapping[str, Any]) -> None:
        """Take this process's share of a state dict."""
        from deepspeed.utils import safe_set_full_optimizer_state

        (group,), (saved,) = self._optimizer.param_groups, whole["param_groups"]
        group.update({name: value for name, value in saved.items() if name != "params"})
        if not whole["state"]:
            return
        step = next(iter(whole["state"].values()))["step"]
        for share in group["params"]:
            zeros: dict[str, Tensor] = {name: torch.zeros_like(share) for name in self.MOMENTS}
            on = share.device if group.get("fused") or group.get("capturable") else "cpu"
            self._optimizer.state[share] = {"step": step.clone().to(on), **zeros}
        self.engine.optimizer._lazy_init_hp_params_optimizer_state()  # as it does by itself in its first step
        for number, parameter in enumerate(self._trained):
            for name in self.MOMENTS:
                safe_set_full_optimizer_state(parameter, whole["state"][number][name].to(parameter.device), name)


def _deepspeed_for(device: torch.device) -> Any:
    """The package, set to work on ``device``.

    Raises:
        ValueError: it works on another kind of device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise ValueError(
            f"DeepSpeed works on {found} here and the trainer on {device.type}: set DS_ACCELERATOR={device.type} or "
            f"trainer.accelerator={found}; or {_INSTEAD}"
        )
    return deepspeed
