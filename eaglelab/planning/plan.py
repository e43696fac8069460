"""The dry run: a composed configuration in, every size of the training out."""

from __future__ import annotations

import dataclasses
import math
import shutil
from typing import Any

from omegaconf import DictConfig

from eaglelab.drafters import DrafterConfig
from eaglelab.features.contents import Contents
from eaglelab.planning.advice import USABLE, Way, ways_to_fit
from eaglelab.planning.data import DataFigures, count_data
from eaglelab.planning.setting import (
    Setting,
    describe_target,
    describe_variant,
    numerics_of,
    on_cpu,
    optim_of,
    placement_of,
)
from eaglelab.target import FINAL, Tap
from eaglelab.target.shape import TargetShape
from eaglelab.training.flops import StepFlops
from eaglelab.training.memory import Memory, drafter_parameters
from eaglelab.variants.rollout import Rollout

TOP_K = 16
MUCH_PADDING = 0.05


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes in bytes, counts of parameters and operations.

    Attributes:
        sharded, drafter_placement: see :class:`~eaglelab.training.memory.Placement`.
        trained, frozen: parameters of the drafter: its own, and those of the target that it uses (embedding, head).
        memory: of a device at the step that needs most.
        device_bytes: of a device's memory; None: not known, nothing is judged.
        micro_batch_tokens, micro_batch_rows: token slots and supervised rows of a mean micro-batch of one device.
        step_tokens, step_rows: the same of an optimizer step over all devices.
        steps_per_epoch, steps: optimizer steps of an epoch and of the training; None: ``trainer.max_epochs`` decides.
        flops: of an optimizer step of one device.
        stores: bytes of a feature store of the training split, by what it keeps.
        free_disk: bytes free in this folder.
        ways: what would make it fit; empty where it fits, or where nothing known helps.
        notes: what was assumed, and what limits the length.
    """

    variant: str
    target_name: str
    target: TargetShape
    target_dtype: str
    precision: str
    accelerator: str
    devices: int
    sharded: bool
    drafter_placement: str
    trained: int
    frozen: int
    data: DataFigures
    memory: Memory
    device_bytes: int | None
    micro_batch_tokens: int
    micro_batch_rows: int
    step_tokens: int
    step_rows: int
    steps_per_epoch: int
    steps: int | None
    flops: StepFlops
    stores: dict[str, int]
    free_disk: int
    ways: list[Way]
    notes: list[str]

    @property
    def fits(self) -> bool | None:
        """Whether the peak leaves the margin of a device free; None: not known."""
        return None if self.device_bytes is None else self.memory.peak <= USABLE * self.device_bytes

    @property
    def epochs(self) -> float | None:
        return None if self.steps is None else self.steps / max(self.steps_per_epoch, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "target"}
        plain = {
            name: dataclasses.asdict(value)
            if dataclasses.is_dataclass(value) and not isinstance(value, type)
            else value
            for name, value in values.items()
        }
        plain["ways"] = [dataclasses.asdict(way) for way in self.ways]
        target = {f.name: getattr(self.target, f.name) for f in dataclasses.fields(self.target) if f.name != "config"}
        peak = {"peak": self.memory.peak, "resident": self.memory.resident}
        return plain | {"target": target, "memory": plain["memory"] | peak, "fits": self.fits}


def make_plan(config: DictConfig) -> Plan:
    """Plan the training that ``config`` describes: ``configs/train.yaml`` with the settings of ``configs/plan.yaml``.

    Raises:
        ValueError: what training would refuse, or a size that nobody told.
    """
    target, name, tokenizer = describe_target(config)
    module = describe_variant(config, target)
    _check_length(config, target, name)
    numerics, placement, cpu = numerics_of(config), placement_of(config), on_cpu(config)
    features = config.get("features") or {}
    online = features.get("source", "online") == "online"
    if (rows := features.get("rows")) is not None and rows < 1:
        raise ValueError(f"features.rows={rows}: the target takes at least one row at a time; null for all of them")
    data = count_data(config, tokenizer)
    largest = data.load(config.data.batch_size, cpu=cpu, largest=True)
    mean = data.load(config.data.batch_size, cpu=cpu)
    setting = Setting(
        target,
        module.drafter_config,
        module.contract,
        module.taps,
        largest,
        optim_of(config),
        numerics,
        placement,
        online,
        module.checkpoint_steps,
        features.get("rows"),
        bool(features.get("ahead")),
    )
    memory, device = setting.memory(), _device_bytes(config, cpu, placement.devices)
    fits = device is None or memory.peak <= USABLE * device
    accumulate, devices = setting.optim.accumulate, placement.devices
    batches = math.ceil(data.rows / (config.data.batch_size * devices))
    trained, frozen = _parameters(setting)
    return Plan(
        variant=module.variant,
        target_name=name,
        target=target,
        target_dtype=str(config.target.dtype),
        precision=str(config.trainer.precision),
        accelerator=str(config.trainer.accelerator),
        devices=devices,
        sharded=placement.sharded,
        drafter_placement=placement.drafter,
        trained=trained,
        frozen=frozen,
        data=data,
        memory=memory,
        device_bytes=device,
        micro_batch_tokens=mean.tokens,
        micro_batch_rows=mean.loss_rows,
        step_tokens=mean.tokens * accumulate * devices,
        step_rows=mean.loss_rows * accumulate * devices,
        steps_per_epoch=max(batches // accumulate, 1),
        steps=_steps(config, max(batches // accumulate, 1)),
        flops=setting.flops(mean),
        stores=stores_of(target, module.taps, data.tokens),
        free_disk=shutil.disk_usage(".").free,
        ways=[] if fits else ways_to_fit(setting, int(USABLE * (device or 0)), largest.length),
        notes=_notes(config, target, data, module.drafter_config, setting.kinds, cpu),
    )


def stores_of(target: TargetShape, taps: tuple[Tap, ...], tokens: float) -> dict[str, int]:
    """Bytes of feature stores of ``tokens`` tokens, by what they keep: as ``eaglelab cache`` writes them."""
    every = tuple(dict.fromkeys((*taps, FINAL)))

    def size(streams: tuple[Tap, ...], dtype: str, **teacher: Any) -> int:
        contents = Contents(streams, dtype, target.hidden_size, target.vocab_size, **teacher)
        return round(tokens * contents.bytes_per_token)

    stores = {f"dtype={dtype}": size(every, dtype) for dtype in ("bfloat16", "int8", "int4")}
    if FINAL not in taps:
        stores["dtype=int8 teacher=top_k"] = size(
            taps, "int8", teacher="top_k", top_k=min(TOP_K, target.vocab_size - 1)
        )
    return stores


def _parameters(setting: Setting) -> tuple[int, int]:
    """Trained ones, and the target's that the drafter uses: the embedding and, without a trained head of its own, a
    head."""
    rollout, drafter, target = setting.kinds[-1], setting.drafter, setting.target
    count = drafter_parameters(drafter, rollout)
    embedding = target.vocab_size * target.hidden_size
    if not rollout.own_head:
        return count, embedding + target.head
    head = (drafter.draft_vocab_size or drafter.vocab_size) * drafter.hidden_size
    return (count, embedding) if rollout.trains_head else (count - head, embedding + head)


def _device_bytes(config: DictConfig, cpu: bool, devices: int) -> int | None:
    """As told; else this machine's: its memory shared by the processes, or its GPU's."""
    if config.device_gib is not None:
        if config.device_gib <= 0:
            raise ValueError(f"device_gib={config.device_gib} must be above 0: the memory of a device in GiB")
        return int(config.device_gib * 2**30)
    if cpu:
        import psutil

        return psutil.virtual_memory().total // devices
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _steps(config: DictConfig, each: int) -> int | None:
    if (config.trainer.get("max_steps") or -1) > 0:
        return int(config.trainer.max_steps)
    epochs = config.trainer.get("max_epochs") or -1
    return int(epochs) * each if epochs > 0 else None


def _check_length(config: DictConfig, target: TargetShape, name: str) -> None:
    """The refusals of training that depend on lengths alone."""
    from eaglelab.target.probe import max_positions

    length, row = config.data.max_length, config.data.row_length
    if length is None:
        raise ValueError(
            "features=store takes its rows from a store; plan the data that the store is made of with features=online, "
            "and read the memory without the target's pass from the ways listed"
        )
    if length > (most := max_positions(target.config)):
        raise ValueError(
            f"data.max_length={length} is beyond the {most} positions of target {name}; lower data.max_length and "
            "data.row_length"
        )
    if config.data.packing and row < length:
        raise ValueError(
            f"row_length={row} is shorter than max_length={length}, so a conversation may fit no row; lower max_length "
            "or raise row_length"
        )


def _notes(
    config: DictConfig,
    target: TargetShape,
    data: DataFigures,
    drafter: DrafterConfig,
    kinds: tuple[Rollout, ...],
    cpu: bool,
) -> list[str]:
    notes = []
    if not data.sampled:
        notes.append(
            f"the data is as told: {config.conversation_tokens} tokens a conversation, {config.answer_share:.0%} of "
            "them in answers (conversation_tokens=, answer_share=)"
        )
    if config.shape.hidden_size is not None:
        notes.append(
            f"the target is Llama-like: {target.config.num_attention_heads} heads, {target.config.num_key_value_heads} "
            f"for keys, MLP of {target.intermediate_size:,}, vocabulary of {target.vocab_size:,} (shape.*)"
        )
    if target.dense_attention:
        notes.append("this family writes attention scores out: the target's pass grows with the square of the length")
    elif (window := getattr(target.config, "sliding_window", None)) and window < data.longest:
        notes.append(
            f"layers with a window of {window:,} tokens take a mask of all pairs of a conversation's tokens: their "
            "memory grows with the square of its length"
        )
    if data.packed and data.padding_share > MUCH_PADDING:
        notes.append(
            f"padding is above {MUCH_PADDING:.0%}: conversations of half a row and more leave room that nothing fills; "
            "raise data.row_length to twice data.max_length and halve data.batch_size"
        )
    if any(kind.dense for kind in kinds):
        notes.append("alignment=shipped writes attention scores out: memory grows with the square of the length")
    if kinds[-1].trains_head and (proposed := drafter.draft_vocab_size or drafter.vocab_size) > 64_000:
        gib = 4 * 4 * proposed * drafter.hidden_size / 2**30
        notes.append(
            f"the own head, its gradient and two moments take {gib:.1f} GiB where they are whole; "
            "variant.draft_vocab_size=32000 as published makes them smaller"
        )
    if len(kinds) > 1:
        notes.append(
            f"{kinds[0].share:.0%} of the steps are EAGLE-1's single pass; operations are the mean, memory the maximum"
        )
    if not cpu:
        notes.append("memory on a GPU is derived like that of a CPU, where it is tested; no GPU has confirmed it")
    return notes
