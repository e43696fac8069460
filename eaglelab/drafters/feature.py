"""The feature drafter of EAGLE-1, EAGLE-2 and HASS (SafeAILab ``cnets1.py``).

``fc([e(x_{t+1}); f_t])`` is the residual stream of one decoder layer without input norm; its output is the next
feature, which the frozen target head reads without a further norm.

Letters: B sequences, N rows, U rows that ask, d hidden width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from eaglelab.data.needed import pick
from eaglelab.drafters.config import DrafterConfig
from eaglelab.drafters.layers import Ask, Attend, DraftAttention, Rotary, SwiGLU
from eaglelab.drafters.network import DraftNetwork
from eaglelab.drafters.shared import LinearMap, Read, keys_of_data, linear_of_data


class FeatureLayer(nn.Module):
    """Attention and MLP with residuals; only the MLP has a norm before it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x_BNd: Tensor, cos: Tensor, sin: Tensor, attend: Attend, slot_BU: Tensor | None = None) -> Tensor:
        return self._behind(pick(x_BNd, slot_BU) + self.self_attn(x_BNd, cos, sin, attend, slot_BU))

    def ask(self, x_BUd: Tensor, cos: Tensor, sin: Tensor, attend: Ask) -> Tensor:
        return self._behind(x_BUd + self.self_attn.ask(x_BUd, cos, sin, attend))

    def _behind(self, x_BUd: Tensor) -> Tensor:
        return x_BUd + self.mlp(self.post_attention_layernorm(x_BUd))


class FeatureDrafter(DraftNetwork):
    """Regresses the next target feature. Tensor names are those of the published checkpoints."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        if config.num_taps != 1:
            raise ValueError(f"a feature drafter reads one tap, got num_taps={config.num_taps}")
        if config.fc_norm or config.recurrence != "pre_norm":
            raise ValueError("fc_norm and recurrence belong to variant=eagle3; a feature drafter has no such norms")
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([FeatureLayer(config)])
        self.rotary = Rotary(config)

    @property
    def _layer(self) -> FeatureLayer:
        layer = self.layers[0]
        assert isinstance(layer, FeatureLayer)
        return layer

    def fuse(self, taps_BNd: Tensor) -> Tensor:
        """One tap: the state is the feature itself."""
        return taps_BNd

    def forward(
        self,
        state_BNd: Tensor,
        embedding_BNd: Tensor,
        position_BN: Tensor,
        attend: Attend,
        slot_BU: Tensor | None = None,
    ) -> Tensor:
        """The predicted ``f_{t+1}`` of every row; arguments as in :class:`DraftNetwork`."""
        return self.behind(self._entered(state_BNd, embedding_BNd), position_BN, attend, slot_BU)

    def enter(self, read: Read) -> Tensor:
        """``fc`` of [embedding; state], which ``read`` gives: the residual stream of rows that no gradient goes to.

        Their input is read again in the backward, not kept.
        """
        return linear_of_data(read, (self.fc.weight, self.fc.bias))

    def behind(self, x_BNd: Tensor, position_BN: Tensor, attend: Attend, slot_BU: Tensor | None = None) -> Tensor:
        """What :meth:`forward` does behind ``fc``."""
        return self._layer(x_BNd, *self.rotary(position_BN), attend, slot_BU)

    def ask(self, x_BUd: Tensor, position_BU: Tensor, attend: Ask) -> Tensor:
        """As :meth:`behind`, over keys that the caller has already, those of the rows themselves included."""
        cos, sin = self.rotary(position_BU)
        return self._layer.ask(x_BUd, cos, sin, attend)

    def keys(self, state_BNd: Tensor, embedding_BNd: Tensor, position_BN: Tensor) -> tuple[Tensor, Tensor]:
        return self._layer.self_attn.keys(self._entered(state_BNd, embedding_BNd), *self.rotary(position_BN))

    def key_maps(self) -> tuple[LinearMap, LinearMap]:
        """The linear maps from [embedding; state] to keys, without their positions, and to values: there is no norm
        between ``fc`` and the projections. For :meth:`keys_of_data`; made once for all its calls.
        """
        weight, bias = self.fc.weight, self.fc.bias
        with torch.autocast(weight.device.type, enabled=False):
            k, v = (
                (x.weight @ weight, None if bias is None else x.weight @ bias)
                for x in (self._layer.self_attn.k_proj, self._layer.self_attn.v_proj)
            )
        return k, v

    def keys_of_data(self, read: Read, position_BN: Tensor, maps: tuple[LinearMap, LinearMap]) -> tuple[Tensor, Tensor]:
        """:meth:`keys` of rows as in :meth:`enter`, of which only keys and values are kept."""
        return keys_of_data(read, *maps, functools.partial(self.rotary, position_BN))

    def _entered(self, state_BNd: Tensor, embedding_BNd: Tensor) -> Tensor:
        return self.fc(torch.cat((embedding_BNd, state_BNd), dim=-1))
