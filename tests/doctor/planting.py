"""Drafters with one fault: trained under another wiring than the one that they declare, or with tensors rearranged.

The bundled target and data. What training decides is trained (a shift, a tap, a residual); what only the order of
numbers in a tensor decides is rearranged in a healthy drafter, and what the manifest declares is changed there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eaglelab.data.batch import Batch
from eaglelab.doctor import Diagnosis, Wiring, diagnose, examine, hypotheses_for
from eaglelab.doctor.rewiring import attention_of, swap_attention_input, swap_fc, swap_norms
from eaglelab.doctor.wiring import read_streams
from eaglelab.drafters import DrafterConfig, DraftNetwork
from eaglelab.drafters.layers import Rotary
from eaglelab.target import FrozenTarget, Tap
from eaglelab.training import RunFolder
from eaglelab.variants import VARIANTS
from eaglelab.variants.base import View
from tests.cli.conftest import run

TRAINED = {
    "eagle": ("token_late", "token_early", "feature_late", "feature_early", "layer_below", "pre_norm"),
    "hass": ("positions_stay", "positions_ahead"),
    "eagle3": (
        "token_late",
        "token_early",
        "feature_late",
        "feature_early",
        "residual_normed",
        "recurrence_post_norm",
        "head_without_norm",
        "positions_stay",
        "positions_ahead",
    ),
}
"""Faults that training decides."""
REARRANGED = {
    "eagle": ("fc_swapped", "rope_interleaved", "rope_10000", "other_target"),
    "eagle3": (
        "attention_swapped",
        "norms_swapped",
        "rope_interleaved",
        "rope_10000",
        "taps_lower",
        "taps_higher",
        "taps_9_6_2",
        "taps_6_9_2",
        "taps_2_9_6",
        "other_target",
    ),
}
"""Faults that are put into a healthy drafter."""
Drafter = tuple[DraftNetwork, FrozenTarget, tuple[Tap, ...]]


def train(
    variant: str, out: Path, fault: str = "declared", *, steps: int = 300, settings: tuple[str, ...] = ()
) -> None:
    """A run folder of ``variant`` that was trained in the wiring of hypothesis ``fault`` and declares its usual one."""
    module = VARIANTS[variant]
    build = module.build_network
    wiring: dict[str, Wiring] = {}

    def build_network(config: DrafterConfig) -> DraftNetwork:
        network = build(config)
        if wiring and wiring["it"].rewire is not None:
            wiring["it"].rewire(network)
        return network

    def view(batch: Batch, target: FrozenTarget, taps: tuple[Tap, ...], source: Any = None) -> View:
        assert batch.rows.causal, "shifts do not know where a packed segment ends"
        return wiring["it"].view(batch, target, read_streams(target, batch, set(wiring["it"].taps)))

    job = [f"variant={variant}", "data.packing=false", "data.batch_size=4", f"trainer.max_steps={steps}", *settings]
    job += [f"trainer.val_check_interval={steps}", "logger=none", "data.val_limit=16", f"hydra.run.dir={out}"]
    if fault == "declared":
        run("train", *job, cwd=out.parent)
        return
    target = FrozenTarget.load("bundled")
    taps: tuple[Tap, ...] = (2, 6, 9) if variant == "eagle3" else ("final",)
    blank = build(DrafterConfig.from_target(target.text_config, num_taps=len(taps)))
    wiring["it"] = {one.name: one.wiring for one in hypotheses_for(blank, target, taps)}[fault]
    with mock.patch.object(module, "build_network", staticmethod(build_network)), mock.patch.object(View, "of", view):
        run("train", *job, cwd=out.parent)


def load(out: Path, target: FrozenTarget) -> Drafter:
    folder = RunFolder.existing(out)
    return folder.load_network(), target, folder.manifest().taps


def rearrange(drafter: Drafter, fault: str) -> Drafter:
    """Put ``fault`` into a healthy drafter: the hypothesis of that name then describes its weights."""
    network, target, taps = drafter
    if fault.startswith("taps_"):
        moved = {"taps_lower": tuple(tap + 1 for tap in taps), "taps_higher": tuple(tap - 1 for tap in taps)}  # type: ignore[operator]
        if fault in moved:
            return network, target, moved[fault]
        true = [int(tap) for tap in fault.removeprefix("taps_").split("_")]
        blocks = dict(zip(taps, network.fc.weight.data.split(network.config.hidden_size, dim=1), strict=True))
        network.fc.weight.data = torch.cat([blocks[tap] for tap in true], dim=1)  # right for streams in that order
        return network, target, taps
    if fault == "rope_10000":
        rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
        assert network.config.rope_parameters["rope_theta"] == 10_000
        network.config = dataclasses.replace(network.config, rope_parameters=rope)
        network.rotary = Rotary(network.config)
        return network, target, taps
    if fault == "other_target":
        return network, other_revision(target), taps
    {
        "fc_swapped": swap_fc,
        "attention_swapped": swap_attention_input,
        "norms_swapped": swap_norms,
        "rope_interleaved": _to_interleaved,
    }[fault](network)
    return network, target, taps


def _to_interleaved(network: DraftNetwork) -> None:
    """The inverse of the hypothesis' reordering: rows of both halves alternate."""
    attention = attention_of(network)
    D = attention.head_dim
    order_D = torch.arange(D).view(2, D // 2).T.flatten()
    for projection in (attention.q_proj, attention.k_proj):
        by_head = projection.weight.data.view(-1, D, projection.in_features)
        projection.weight.data = by_head[:, order_D].reshape(-1, projection.in_features)


def other_revision(target: FrozenTarget) -> FrozenTarget:
    """The same model with its hidden directions permuted: as good a language model, with other features.

    Permutes the residual stream of a Llama consistently, so logits stay the same to rounding.
    """
    import copy

    model = copy.deepcopy(target.model)
    order_d = torch.randperm(target.hidden_size, generator=torch.Generator().manual_seed(0))
    reading = (
        "embed_tokens",
        "lm_head",
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
    )  # d is their second axis
    for name, parameter in model.named_parameters():
        across = name.removesuffix(".weight").endswith(reading)
        parameter.data = parameter.data[:, order_d] if across else parameter.data[order_d]
    return FrozenTarget(model, target.tokenizer)


def diagnosis_of(drafter: Drafter, conversations: list[tuple[list[int], int]]) -> Diagnosis:
    network, target, taps = drafter
    return diagnose(examine(network.eval(), target, hypotheses_for(network, target, taps), conversations))


def named(diagnosis: Diagnosis) -> str:
    """The doctor's answer in one word."""
    if diagnosis.verdict == "no_wiring_fits":
        return "other_target"
    return diagnosis.best.hypothesis.name if diagnosis.verdict == "other_wiring" else diagnosis.verdict
