"""A drafter at decoding time: its own key/value slots over a network and the target's embedding and head.

Two kinds of rows live in the slots. *Committed* rows come from target features and stay; *provisional* rows are
tree nodes drafted in this round and are dropped when the round ends.

Letters: B sequences, N new rows, W frontier nodes, P provisional rows so far, K slots read, H heads, G key/value
heads, D head width, d hidden width, T taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglelab.drafters.config import DrafterConfig
from eaglelab.drafters.layers import Attend
from eaglelab.drafters.network import DraftNetwork
from eaglelab.target import FrozenTarget, Tap


class DraftState:
    """Draft key/value slots of a batch.

    Attributes:
        lengths: committed rows per sequence.
        provisional: tree rows written behind them, the same count in every sequence.
    """

    def __init__(self, config: DrafterConfig, batch: int, capacity: int, like: Tensor) -> None:
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        self.keys_BGCD, self.values_BGCD = like.new_empty(shape), like.new_empty(shape)
        self.capacity = capacity
        self.lengths = [0] * batch
        self.provisional = 0

    @property
    def bytes(self) -> int:
        """Memory of the slots."""
        return 2 * self.keys_BGCD.numel() * self.keys_BGCD.element_size()

    def write(self, k_BGND: Tensor, v_BGND: Tensor) -> tuple[Tensor, Tensor]:
        """Store N rows behind what is there; return all slots up to the last written one [B, G, K, D].

        Raises:
            ValueError: the slots are full.
        """
        N = k_BGND.shape[2]
        starts = [length + self.provisional for length in self.lengths]
        end = max(starts) + N
        if end > self.capacity:
            raise ValueError(f"draft slots: {end} rows needed, capacity is {self.capacity}; ask for more in new_state")
        if len(set(starts)) == 1:
            self.keys_BGCD[:, :, starts[0] : end] = k_BGND
            self.values_BGCD[:, :, starts[0] : end] = v_BGND
        else:
            for b, start in enumerate(starts):
                self.keys_BGCD[b, :, start : start + N] = k_BGND[b]
                self.values_BGCD[b, :, start : start + N] = v_BGND[b]
        return self.keys_BGCD[:, :, :end], self.values_BGCD[:, :, :end]

    def committed_mask(self, K: int) -> Tensor:
        """bool [B, K]: slots that hold committed rows."""
        slot_K = torch.arange(K, device=self.keys_BGCD.device)
        return slot_K < torch.tensor(self.lengths, device=slot_K.device)[:, None]


class SlotDrafter:
    """The decoding protocol (``prefill`` = first ``extend``, ``extend``, ``step``) for any drafter network.

    Args:
        network: a drafter (:class:`~eaglelab.drafters.feature.FeatureDrafter`), in the target's dtype.
        target: supplies embedding and head; never copied.
        taps: the target streams that ``extend`` receives, concatenated.
    """

    def __init__(self, network: DraftNetwork, target: FrozenTarget, taps: tuple[Tap, ...]) -> None:
        network.eval()
        self.network = network
        self.target = target
        self.taps = taps
        self.max_positions = network.config.max_position_embeddings

    def new_state(self, batch: int, capacity: int) -> DraftState:
        """Empty slots for ``batch`` sequences of up to ``capacity`` rows, provisional ones included."""
        return DraftState(self.network.config, batch, capacity, like=next(self.network.parameters()))

    @torch.no_grad()
    def extend(
        self,
        state: DraftState,
        features_BNF: Tensor,
        tokens_BN: Tensor,
        position_BN: Tensor,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Append target-derived rows: row ``t`` reads the taps of ``x_t`` and the token ``x_{t+1}``.

        Args:
            state: the slots; provisional rows must be gone.
            features_BNF: taps concatenated, F = T * d.
            tokens_BN: advanced tokens.
            position_BN: rotary position of each row, its token index ``t``.
            counts: real rows per sequence where the batch is ragged; the rest is padding.

        Returns:
            [B, N, d]; the output of row ``t`` predicts ``x_{t+2}``.
        """
        assert state.provisional == 0, "discard the last round's tree first"
        N = tokens_BN.shape[1]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = state.write(k, v)
            K = keys.shape[2]
            if N == 1 and len(set(state.lengths)) == 1:
                return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            if K == N:
                return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            slot_K = torch.arange(K, device=q.device)
            last_BN = torch.tensor(state.lengths, device=q.device)[:, None] + torch.arange(N, device=q.device)
            visible_BNK = slot_K <= last_BN[..., None]
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible_BNK[:, None], enable_gqa=True)

        fused_BNd = self.network.fuse(features_BNF)
        hidden_BNd = self._forward(fused_BNd, tokens_BN, position_BN, attend)
        counts = [N] * len(state.lengths) if counts is None else counts
        state.lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        return hidden_BNd

    @torch.no_grad()
    def step(
        self,
        state: DraftState,
        hidden_BWd: Tensor,
        tokens_BW: Tensor,
        position_BW: Tensor,
        ancestor_BWP: Tensor | None = None,
    ) -> Tensor:
        """Forward W tree nodes as provisional rows.

        Args:
            state: the slots.
            hidden_BWd: the output of each node's parent.
            tokens_BW: each node's token.
            position_BW: committed rows + level - 1, counting the root's children as level 1.
            ancestor_BWP: bool, which provisional rows a node sees: those written earlier this round, then the W
                new ones; itself included. None: all of the earlier ones and itself (a chain, W = 1).

        Returns:
            [B, W, d].
        """
        W = tokens_BW.shape[1]
        assert ancestor_BWP is not None or W == 1

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = state.write(k, v)
            mask = None
            if ancestor_BWP is not None or len(set(state.lengths)) > 1:
                mask = self._tree_mask(state, ancestor_BWP, W, keys.shape[2])
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        hidden_BWd = self._forward(hidden_BWd, tokens_BW, position_BW, attend)
        state.provisional += W
        return hidden_BWd

    def discard(self, state: DraftState) -> None:
        """Drop the provisional rows; committed rows stay."""
        state.provisional = 0

    @torch.no_grad()
    def log_probs(self, hidden: Tensor) -> Tensor:
        """[..., d] -> fp32 log-softmax over the draft vocabulary, at T = 1 whatever the sampling temperature."""
        return self.network.logits(hidden, self.target.lm_head).float().log_softmax(-1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target ids."""
        return self.network.to_target_ids(draft_ids)

    def _forward(self, state_BNd: Tensor, tokens_BN: Tensor, position_BN: Tensor, attend: Attend) -> Tensor:
        return self.network(state_BNd, self.target.embed(tokens_BN), position_BN, attend)

    @staticmethod
    def _tree_mask(state: DraftState, ancestor_BWP: Tensor | None, W: int, K: int) -> Tensor:
        """bool [B, 1, W, K]: committed slots plus the given provisional ones behind them."""
        P = state.provisional + W
        if ancestor_BWP is not None and len(set(state.lengths)) == 1:
            return F.pad(ancestor_BWP, (K - P, 0), value=True)[:, None]
        committed_BK = state.committed_mask(K)
        if ancestor_BWP is None:
            ancestor_BWP = torch.ones(len(state.lengths), W, P, dtype=torch.bool, device=committed_BK.device)
        mask_BWK = committed_BK[:, None].repeat(1, W, 1)
        for b, length in enumerate(state.lengths):
            mask_BWK[b, :, length : length + P] = ancestor_BWP[b if ancestor_BWP.shape[0] > 1 else 0]
        return mask_BWK[:, None]
