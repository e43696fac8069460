"""Changes to a drafter's network that another reading of the same tensors amounts to.

Letters: N rows, d hidden width, D head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from eaglelab.drafters import DraftNetwork, FeatureDrafter, FusedDrafter, Head
from eaglelab.drafters.config import Recurrence
from eaglelab.drafters.fused import FusedLayer
from eaglelab.drafters.layers import DraftAttention, Rotary
from eaglelab.target import FrozenTarget


def attention_of(network: DraftNetwork) -> DraftAttention:
    layer = network.midlayer if isinstance(network, FusedDrafter) else cast(FeatureDrafter, network)._layer
    return cast(DraftAttention, layer.self_attn)


def swap_halves(*weights: nn.Linear) -> None:
    """Exchange the two halves of the input of each projection."""
    for one in weights:
        first, second = one.weight.data.chunk(2, dim=1)
        one.weight.data = torch.cat((second, first), dim=1)


def swap_fc(network: DraftNetwork) -> None:
    """``fc`` reads [feature; embedding]."""
    swap_halves(cast(FeatureDrafter, network).fc)


def swap_attention_input(network: DraftNetwork) -> None:
    """Attention reads [norm(h); norm(e)]."""
    attention = attention_of(network)
    swap_halves(attention.q_proj, attention.k_proj, attention.v_proj)


def swap_norms(network: DraftNetwork) -> None:
    """The norm of the embedding and that of the state change places."""
    layer = cast(FusedDrafter, network).midlayer
    layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm


def interleaved_rotary(network: DraftNetwork) -> None:
    """Heads whose neighbouring entries are paired by the rotation (GPT-J layout), in place of its two halves."""
    attention = attention_of(network)
    D = attention.head_dim
    order_D = torch.arange(D).view(D // 2, 2).T.flatten()
    for projection in (attention.q_proj, attention.k_proj):
        by_head = projection.weight.data.view(-1, D, projection.in_features)
        projection.weight.data = by_head[:, order_D].reshape(-1, projection.in_features)


def rotary_base(theta: float) -> Callable[[DraftNetwork], None]:
    """Another base, without a scaling law."""

    def change(network: DraftNetwork) -> None:
        rope = {"rope_type": "default", "rope_theta": theta}
        config = dataclasses.replace(network.config, rope_parameters=rope)
        like = cast(FeatureDrafter, network).rotary.cos_PD
        network.rotary = Rotary(config).to(like.device)

    return change


def normed_residual(network: DraftNetwork) -> None:
    """The residual of attention is the normed state."""
    cast(FusedDrafter, network).midlayer.__class__ = _NormedResidual


class _NormedResidual(FusedLayer):
    def residual(self, h_BUd: Tensor) -> Tensor:
        return self.hidden_norm(h_BUd)


def other_recurrence(network: DraftNetwork) -> None:
    """The state that is fed back has passed the final norm, or has not, where it had."""
    other: Recurrence = "pre_norm" if network.config.recurrence == "post_norm" else "post_norm"
    network.config = dataclasses.replace(network.config, recurrence=other)


def head_without_norm(network: DraftNetwork) -> None:
    """The head reads the state before the final norm."""
    network.__class__ = _HeadWithoutNorm


class _HeadWithoutNorm(FusedDrafter):
    @property
    def head_parameters(self) -> list[Tensor]:
        return [self.lm_head.weight]

    def head_input(self, state: Tensor) -> Tensor:
        return state


def head_of_target(network: DraftNetwork) -> None:
    """The target's head, and its whole vocabulary, in place of the drafter's own."""
    network.__class__ = _HeadOfTarget


class _HeadOfTarget(FusedDrafter):
    def logits(self, state: Tensor, target_head: Head) -> Tensor:
        return target_head(self.head_input(state))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


def unmapped(network: DraftNetwork) -> None:
    """Draft ids are target ids."""
    network.__class__ = _Unmapped


class _Unmapped(FusedDrafter):
    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


def final_norm_before_head(target: FrozenTarget) -> Callable[[DraftNetwork], None]:
    """A feature drafter that predicts streams: the target's final norm comes before its head."""

    def change(network: DraftNetwork) -> None:
        network.__class__ = _NormBeforeHead
        network.__dict__["final_norm"] = target.final_norm

    return change


class _NormBeforeHead(FeatureDrafter):
    def logits(self, state: Tensor, target_head: Head) -> Tensor:
        return target_head(self.__dict__["final_norm"](state))
