"""A composed training configuration as shapes and sizes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import LlamaConfig

from eaglelab.drafters import DrafterConfig
from eaglelab.target import Tap
from eaglelab.target.loading import as_dtype
from eaglelab.target.shape import TargetShape, read_description
from eaglelab.training.activations import WIDE, Numerics
from eaglelab.training.flops import Load, StepFlops, step_flops
from eaglelab.training.memory import Memory, Placement, step_memory
from eaglelab.training.precision import HALF, require_precision
from eaglelab.training.strategies import ShardedStrategy
from eaglelab.training.zero import ZeroStrategy
from eaglelab.variants import DraftingModule, OptimConfig
from eaglelab.variants.contract import Contract
from eaglelab.variants.rollout import Rollout, rollouts


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything that decides memory and work of a step.

    Attributes:
        load: the largest micro-batch.
        online: the target runs.
        checkpoint_steps: the setting of that name.
        target_rows: rows that the target takes at a time; None: all of the micro-batch.
        ahead: it takes them one batch early.
    """

    target: TargetShape
    drafter: DrafterConfig
    contract: Contract
    taps: tuple[Tap, ...]
    load: Load
    optim: OptimConfig
    numerics: Numerics
    placement: Placement
    online: bool = True
    checkpoint_steps: bool = False
    target_rows: int | None = None
    ahead: bool = False

    @property
    def kinds(self) -> tuple[Rollout, ...]:
        return tuple(dataclasses.replace(one, checkpointed=self.checkpoint_steps) for one in rollouts(self.contract))

    def memory(self) -> Memory:
        """Of the step that needs most."""
        return step_memory(
            self.target,
            self.drafter,
            self.kinds,
            self.load,
            self.optim,
            self.numerics,
            self.placement,
            online=self.online,
            target_rows=self.target_rows,
            ahead=self.ahead,
        )

    def flops(self, load: Load) -> StepFlops:
        """Of an optimizer step of one process over micro-batches like ``load``."""
        return step_flops(self.target, self.drafter, self.contract, load, self.optim, online=self.online)


def describe_target(config: DictConfig) -> tuple[TargetShape, str, Any]:
    """Shape, name and tokenizer of the target; no weight is read.

    ``shape`` describes a Llama-like target that is not at hand, and has no tokenizer.

    Raises:
        ValueError: no target, or a shape without its two necessary numbers.
    """
    given = {name: value for name, value in config.shape.items() if value is not None}
    if not given:
        settings = OmegaConf.to_container(config.target, resolve=True)
        assert isinstance(settings, dict)
        for name in ("dtype", "attn_implementation"):
            settings.pop(name, None)
        source = settings.pop("source")
        described, tokenizer = read_description(source, **{str(name): value for name, value in settings.items()})
        trusted = bool(settings.get("trust_remote_code"))
        return TargetShape.of_config(described, trust_remote_code=trusted), str(source), tokenizer
    if missing := [name for name in ("hidden_size", "num_layers") if name not in given]:
        raise ValueError(
            f"shape.{missing[0]} is missing: a target's shape needs shape.hidden_size and shape.num_layers"
        )
    return TargetShape.of_config(_llama(**given)), "a target of the given shape", None


def _llama(
    hidden_size: int,
    num_layers: int,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_key_value_heads: int | None = None,
    vocab_size: int = 128_256,
    max_positions: int = 131_072,
    tied: bool = False,
) -> LlamaConfig:
    """What is not given is as in Llama-3: heads of 128, 8 key/value heads, an MLP of 3.5 d."""
    heads = num_heads or max(hidden_size // 128, 1)
    if hidden_size % heads:
        raise ValueError(
            f"shape.num_heads={heads} does not divide shape.hidden_size={hidden_size}; set shape.num_heads"
        )
    return LlamaConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        intermediate_size=intermediate_size or int(3.5 * hidden_size),
        num_attention_heads=heads,
        num_key_value_heads=num_key_value_heads or (8 if heads % 8 == 0 else heads),
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
    )


def describe_variant(config: DictConfig, target: TargetShape) -> DraftingModule:
    """The variant's module on the meta device: its contract, taps and drafter as training would have them.

    Raises:
        ValueError: a switch or a shape that training would refuse.
    """
    settings = OmegaConf.to_container(config.variant, resolve=True)
    assert isinstance(settings, dict)
    size = settings.pop("draft_vocab_size", None)
    if size is not None and not 1 <= size <= target.vocab_size:
        raise ValueError(
            f"variant.draft_vocab_size={size} must be from 1 to {target.vocab_size}, the target's vocabulary"
        )
    build = instantiate(settings, _partial_=True, _convert_="all")
    with torch.device("meta"):
        outline: Any = SimpleNamespace(
            text_config=target.config,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            head_weight=torch.empty(target.vocab_size, target.hidden_size),
        )
        checkpoint_steps = bool(config.get("checkpoint_steps"))
        module: DraftingModule = build(
            target=outline, optim=optim_of(config), seed=0, checkpoint_steps=checkpoint_steps
        )
    if size is not None and size < target.vocab_size:
        module.drafter_config = dataclasses.replace(module.drafter_config, draft_vocab_size=size)
    return module


def optim_of(config: DictConfig) -> OptimConfig:
    settings = OmegaConf.to_container(config.optim, resolve=True)
    assert isinstance(settings, dict)
    return OptimConfig(**{str(name): value for name, value in settings.items()})


def numerics_of(config: DictConfig) -> Numerics:
    """Sizes of numbers under ``trainer.precision`` and ``target.dtype``.

    Raises:
        ValueError: a precision whose memory is not known here, or one that does not go with the target's.
    """
    require_precision(config.trainer.precision, config.target.dtype)
    target = as_dtype(config.target.dtype).itemsize
    half = str(config.trainer.precision) in HALF
    cpu = on_cpu(config)
    return Numerics(2 if half else WIDE, target, fused_norms=not half and not cpu, written_out=not cpu)


def on_cpu(config: DictConfig) -> bool:
    return config.trainer.accelerator == "cpu"


def placement_of(config: DictConfig) -> Placement:
    """Processes and how the target is spread over them.

    Raises:
        ValueError: the number of devices is left to the machine.
    """
    devices = config.devices
    if devices is None:
        each = config.trainer.devices
        if not isinstance(each, int) or each < 1:
            raise ValueError(f"trainer.devices={each} is left to the machine; tell the number with devices=N")
        devices = each * int(config.trainer.get("num_nodes", 1) or 1)
    if devices < 1:
        raise ValueError(f"devices={devices}: a training needs at least one")
    strategy = config.trainer.get("strategy")
    settings = strategy if isinstance(strategy, DictConfig) else {}
    kind = get_class(settings["_target_"]) if "_target_" in settings else None
    if kind is ZeroStrategy:
        return Placement(int(devices), drafter="partitioned")
    if kind is not ShardedStrategy:
        return Placement(int(devices))
    return Placement(int(devices), sharded=True, drafter="sharded" if settings.get("shard_drafter", True) else "whole")
