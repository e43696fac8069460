"""The fused drafter of EAGLE-3 (SafeAILab ``cnets.py``).

Three target streams are fused once, ``fc`` 3d -> d; one decoder layer attends over ``[norm(e); norm(h)]``, 2d wide; its
output before the final norm is the next state, and after it what the drafter's own head reads. EAGLE-3.1 (TorchSpec,
vLLM) has the same tensors, one norm per stream in front of ``fc``, and feeds the *normed* output back.

Letters: B sequences, N rows, U rows that ask, T taps, F = T d, d hidden width, V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eaglelab.data.needed import pick
from eaglelab.drafters.config import DrafterConfig
from eaglelab.drafters.layers import Attend, DraftAttention, Rotary, SwiGLU
from eaglelab.drafters.network import DraftNetwork, Head


class FusedLayer(nn.Module):
    """Norms for embedding and state apart, attention over both, MLP; the state is the residual."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(d, eps=eps)
        self.hidden_norm = nn.RMSNorm(d, eps=eps)
        self.self_attn = DraftAttention(config, 2 * d)
        self.post_attention_layernorm = nn.RMSNorm(d, eps=eps)
        self.mlp = SwiGLU(d, config.intermediate_size)

    def forward(
        self,
        h_BNd: Tensor,
        e_BNd: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        slot_BU: Tensor | None = None,
    ) -> Tensor:
        read_BNi = self.attention_input(h_BNd, e_BNd)
        h_BUd = self.residual(pick(h_BNd, slot_BU)) + self.self_attn(read_BNi, cos, sin, attend, slot_BU)
        return h_BUd + self.mlp(self.post_attention_layernorm(h_BUd))

    def residual(self, h_BUd: Tensor) -> Tensor:
        """What attention is added to: the state itself."""
        return h_BUd

    def attention_input(self, h_BNd: Tensor, e_BNd: Tensor) -> Tensor:
        """[norm(e); norm(h)], 2d wide."""
        return torch.cat((self.input_layernorm(e_BNd), self.hidden_norm(h_BNd)), dim=-1)


class FusedDrafter(DraftNetwork):
    """Predicts tokens directly; its states owe nothing to the target's features.

    Tensor names are those of the published checkpoints. ``d2t`` (int64 [K], an offset) and ``t2d`` (bool [V]) exist
    with a reduced draft vocabulary only, and always travel with the head that was trained for them.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        d, V = config.hidden_size, config.vocab_size
        self.fc = nn.Linear(config.num_taps * d, d, bias=config.fc_bias)
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(d, eps=config.rms_norm_eps) for _ in range(config.num_taps))
            if config.fc_norm
            else None
        )
        self.midlayer = FusedLayer(config)
        self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size or V, bias=False)
        self.rotary = Rotary(config)
        if config.draft_vocab_size is not None:
            first = torch.arange(V) < config.draft_vocab_size
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", first)

    @property
    def ids_K(self) -> Tensor | None:
        """int64 [K], target ids of the draft vocabulary; None when it is the target's."""
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def fuse(self, taps_BNF: Tensor) -> Tensor:
        """The learned fusion of the streams."""
        if self.fc_norm is not None:
            streams = taps_BNF.split(self.config.hidden_size, dim=-1)
            taps_BNF = torch.cat([norm(x_BNd) for norm, x_BNd in zip(self.fc_norm, streams, strict=True)], dim=-1)
        return self.fc(taps_BNF)

    def forward(
        self,
        state_BNd: Tensor,
        embedding_BNd: Tensor,
        position_BN: Tensor,
        attend: Attend,
        slot_BU: Tensor | None = None,
    ) -> Tensor:
        """The next state, before the final norm or after it; arguments as in :class:`DraftNetwork`."""
        state_BUd = self.midlayer(state_BNd, embedding_BNd, *self.rotary(position_BN), attend, slot_BU)
        return self.norm(state_BUd) if self.recurs_normed else state_BUd

    def keys(self, state_BNd: Tensor, embedding_BNd: Tensor, position_BN: Tensor) -> tuple[Tensor, Tensor]:
        x_BNi = self.midlayer.attention_input(state_BNd, embedding_BNd)
        return self.midlayer.self_attn.keys(x_BNi, *self.rotary(position_BN))

    @property
    def recurs_normed(self) -> bool:
        """Whether a state has passed the final norm already."""
        return self.config.recurrence == "post_norm"

    def head_input(self, state: Tensor) -> Tensor:
        """What the head reads of a state: normed exactly once."""
        return state if self.recurs_normed else self.norm(state)

    @property
    def head_parameters(self) -> list[Tensor]:
        """What :meth:`logits` multiplies a state with."""
        return [self.lm_head.weight] if self.recurs_normed else [self.norm.weight, self.lm_head.weight]

    def logits(self, state: Tensor, target_head: Head) -> Tensor:
        """[..., d] -> [..., K] through the drafter's own norm and head."""
        return self.lm_head(self.head_input(state))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.config.draft_vocab_size is None else draft_ids + self.d2t[draft_ids]

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):  # type: ignore[no-untyped-def]
        """As usual, and the two maps must agree.

        Raises:
            ValueError: ``nonzero(t2d)`` is not ``arange(K) + d2t``; an absolute ``d2t`` is recognised.
        """
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        ids_K = self.ids_K
        if ids_K is not None:
            expected_K = self.t2d.nonzero().flatten()
            if not ids_K.equal(expected_K):
                absolute = self.d2t.equal(expected_K)
                hint = "d2t holds absolute ids; it must hold offsets, ids - arange" if absolute else "one was replaced"
                raise ValueError(f"draft vocabulary maps disagree: nonzero(t2d) is not arange + d2t ({hint})")
        return result
