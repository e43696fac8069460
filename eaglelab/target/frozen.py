"""The one wrapper around the frozen target: features, head, embedding and tree forwards.

Letters: B batch, S tokens, N new rows, K key slots, d hidden, V vocab.

Everything model-specific goes through the library's own interfaces (position ids, 4-D masks, the
cache protocol, forward hooks), so no modelling code is copied and any causal LM with softmax
attention serves as a target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eaglelab import assets
from eaglelab.kernels.recording import Recordings
from eaglelab.ops import no_grad, on_device
from eaglelab.target import inputs, loading, probe
from eaglelab.target.decoder import find_wiring, use_exact_attention
from eaglelab.target.fingerprint import TargetFingerprint, fingerprint_target
from eaglelab.target.kv import KeepNothing, KVSlots, LayerShape, SlotPlan
from eaglelab.target.masks import MaskRule, segment_allowed
from eaglelab.target.sequences import SequencePlan, plan_sequences
from eaglelab.target.taps import FINAL, Tap, validate_taps
from eaglelab.target.unpacking import features_of_segments, passes_missing


@dataclass
class RowsOutput:
    """What a forward pass over new rows returns: logits [B, N, V], features by tap [B, N, d]."""

    logits_BNV: Tensor
    features: dict[Tap, Tensor] = field(default_factory=dict)


class FrozenTarget(nn.Module):
    """A causal LM that never learns: gradients off, eval mode for good, not in any checkpoint.

    Its weights are identified by ``fingerprint`` instead of being saved: ``state_dict()`` is empty
    and loading one back expects nothing.

    Raises:
        ValueError: the model is not a causal LM that this wrapper reproduces exactly.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        source: str = "memory",
        revision: str | None = None,
        location: loading.Location | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.source = source
        self.revision = revision
        self._location = location
        self._wrap(model)
        self._prefix = ""
        self.register_load_state_dict_post_hook(_expect_nothing)
        if tokenizer is not None:
            from_gguf = location is not None and location.gguf_file is not None
            loading.check_vocabulary(tokenizer, self.embedding_size, from_gguf)
        self._embed_scale, self._head_form = self._ask()

    def _wrap(self, model: Any) -> None:
        self.model = model.requires_grad_(False)
        self.train(False)
        self.text_config = model.config.get_text_config()
        self.max_positions = probe.max_positions(self.text_config)
        self._wiring = find_wiring(model)
        self._masks = MaskRule.from_config(self.text_config)
        use_exact_attention(model)
        self.num_layers = len(self._wiring.layers)
        self.embedding_size = int(self._wiring.embedding.num_embeddings)
        self.hidden_size = int(self._wiring.head.in_features)
        self.vocab_size = int(self._wiring.head.out_features)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
        gguf_file: str | None = None,
        attn_implementation: str = "sdpa",
    ) -> FrozenTarget:
        """Load a target.

        Args:
            source: a hub id, a folder, a ``.gguf`` file, or ``"bundled"`` for the small target
                that ships with the package.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` (or their short names).
            revision: a hub branch, tag or commit.
            gguf_file: a GGUF file inside ``source``.
            attn_implementation: ``"sdpa"``, or ``"eager"``; families without sdpa use eager.

        Raises:
            ValueError: nothing loadable there, incomplete, or a model that cannot be a target.
        """
        bundled = source == "bundled"
        model, tokenizer, place = loading.load(
            assets.bundled_target() if bundled else source,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            gguf_file=gguf_file,
            attn_implementation=attn_implementation,
        )
        name = "bundled" if bundled else place.source
        return cls(model, tokenizer, source=name, revision=place.revision, location=place)

    # --- frozen for good --------------------------------------------------------------------

    def train(self, mode: bool = True) -> FrozenTarget:
        """Stays in eval mode whatever the caller wants."""
        return super().train(False)

    def assert_frozen(self) -> None:
        """Raises AssertionError naming what is trainable, has a gradient or is in train mode."""
        for name, parameter in self.named_parameters():
            assert not parameter.requires_grad, f"target parameter {name} requires a gradient"
            assert parameter.grad is None, f"target parameter {name} has a gradient"
        for name, module in self.named_modules():
            assert not module.training, f"target module {name or 'FrozenTarget'} is in train mode"

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Empty: a checkpoint names its target by fingerprint, it does not carry it."""
        return kwargs.get("destination", args[0] if args else None) or {}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._prefix = prefix

    # --- identity ---------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self._wiring.head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self._wiring.head.weight.device

    @cached_property
    def fingerprint(self) -> TargetFingerprint:
        """Digests of config, weights and tokenizer; computed once, kept on disk for folders."""
        return fingerprint_target(self)

    @property
    def checkpoint_files(self) -> loading.Location | None:
        """Where the stored checkpoint lies; None for models made in memory."""
        return self._location

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a generation: generation config, model config and tokenizer."""
        ids: set[Any] = set()
        for holder in (
            getattr(self.model, "generation_config", None),
            self.text_config,
            self.tokenizer,
        ):
            value = getattr(holder, "eos_token_id", None)
            ids.update(value if isinstance(value, list | tuple) else [value])
        return frozenset(int(i) for i in ids - {None} if 0 <= int(i) < self.vocab_size)

    # --- several processes ------------------------------------------------------------------

    def shard(self, device: str | torch.device) -> None:
        """Keep only this process's share of every decoder layer; a layer is put together while it runs (FSDP2).

        Embedding, head and the last norm stay whole: losses and decoding use them outside of a forward pass. A target
        that is sharded already stays as it is.

        Args:
            device: of this process.

        Raises:
            ValueError: no process group, that is, a single process.
        """
        if not torch.distributed.is_initialized():
            raise ValueError("a target is sharded over several processes, and there is one; use trainer=ddp or gpu")
        _ = self.fingerprint  # of the whole weights
        self._shard_layers(torch.device(device))
        self.to(device)

    def _shard_layers(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if any(isinstance(layer, FSDPModule) for layer in self._wiring.layers):
            return
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        for layer in self._wiring.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)

    # --- embedding and head -----------------------------------------------------------------

    @no_grad
    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings as the model feeds them to layer 0, [...] -> [..., d].

        Includes the family's scale (Gemma, Granite); learned position vectors are not part of it.
        """
        embedded: Tensor = self._wiring.embedding(ids)
        return embedded if self._embed_scale == 1.0 else embedded * self._embed_scale

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The target's own logits for final features, [..., d] -> [..., V]; differentiable in
        ``hidden``. Scale and softcap of the family included."""
        head = self._wiring.head
        return self._head_form.apply(head(hidden.to(head.weight.dtype)))

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, d], tied or not."""
        return self._wiring.head.weight

    @property
    def decoder(self) -> nn.Module:
        """The stack of layers that turns token ids into final features."""
        return self._wiring.decoder

    @property
    def last_layer(self) -> nn.Module:
        """The decoder layer in front of the final norm."""
        return self._wiring.layers[-1]

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm in front of the head; None for families that name it unusually."""
        return self._wiring.norm

    @property
    def head_logits_are_linear(self) -> bool:
        """True if ``lm_head(h)`` is exactly ``h @ head_weight.T``: no bias, scale or softcap."""
        return self._head_form.linear and self._wiring.head.bias is None

    # --- features of whole sequences ----------------------------------------------------------

    def plan_sequences(
        self,
        tokens_BS: Tensor,
        *,
        valid_BS: Tensor | None = None,
        segment_BS: Tensor | None = None,
        position_BS: Tensor | None = None,
    ) -> SequencePlan:
        """Check rows for `features_of`, on the device they are on. Arguments and errors are those of `features`."""
        limits = {"embedding_size": self.embedding_size, "max_positions": self.max_positions}
        return plan_sequences(tokens_BS, valid_BS, segment_BS, position_BS, **limits)

    def features(
        self,
        tokens_BS: Tensor,
        taps: Sequence[Tap],
        *,
        valid_BS: Tensor | None = None,
        segment_BS: Tensor | None = None,
        position_BS: Tensor | None = None,
    ) -> dict[Tap, Tensor]:
        """Features of whole rows, by tap, each [B, S, d].

        Args:
            tokens_BS: token ids; anything on padding.
            taps: feature addresses, see `eaglelab.target.taps`.
            valid_BS: bool, False on padding. Default: all valid.
            segment_BS: several samples in one row: 0, 1, 2 ..., -1 on padding. Attention never
                crosses a segment; a segment's features equal those of the sample alone.
            position_BS: default: restarting at 0 in each segment.

        Raises:
            ValueError: shapes, token ids, positions or taps outside what the target has.
        """
        plan = self.plan_sequences(
            tokens_BS.to(self.device), valid_BS=valid_BS, segment_BS=segment_BS, position_BS=position_BS
        )
        return self.features_of(plan, taps)

    def compile_layers(self) -> None:
        """Run every decoder layer through `torch.compile` from now on: one graph serves all layers of a kind, and
        lengths of all batches. Taps, masks and the cache stay as they are."""
        for layer in self._wiring.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)

    @torch.no_grad()
    def features_of(self, plan: SequencePlan, taps: Sequence[Tap], *, missing: int | None = None) -> dict[Tap, Tensor]:
        """Features of planned rows, by tap, each [B, S, d]; the plan must be on the target's device.

        Args:
            missing: passes to make behind these for the sake of other processes; None: ask them, one plan each.

        Raises:
            ValueError: taps that the target does not have.
        """
        taps = validate_taps(taps, self.num_layers)
        tokens_BS, position_BS, groups = plan.tokens_BS, plan.position_BS, plan.groups
        if missing is None:
            missing = self.passes_missing([plan])
        if groups:
            features = features_of_segments(groups, tokens_BS, lambda t, p: self._features(t, p, None, taps))
        elif plan.plain:
            index_1S = torch.arange(tokens_BS.shape[1], device=self.device)[None]
            features = self._features(tokens_BS, index_1S.expand_as(tokens_BS), None, taps)
        else:
            mask = self._masks.additive(segment_allowed(plan.segment_BS), position_BS, position_BS, self.dtype)
            features = self._features(tokens_BS, position_BS, mask, taps)
        for _ in range(missing):
            self._features(torch.zeros_like(tokens_BS[:1, :1]), torch.zeros_like(tokens_BS[:1, :1]), None, ())
        return features

    def passes_missing(self, plans: Sequence[SequencePlan]) -> int:
        """How many passes the target's other processes make beyond those of this one's plans; all of them must ask."""
        passes = sum(len(plan.groups) if plan.groups else 1 for plan in plans)
        return passes_missing(self._wiring.layers[0], passes, self.device)

    def _features(self, tokens_BS: Tensor, position_BS: Tensor, mask: Any, taps: Sequence[Tap]) -> dict[Tap, Tensor]:
        cache = None if mask is not None or self.device.type == "cpu" else KeepNothing()
        with self._wiring.tapping(taps) as tapped:
            final_BSd = self._wiring.run(tokens_BS, position_BS, mask, cache)
        return {tap: final_BSd if tap == FINAL else tapped[tap] for tap in taps}

    # --- rows after a committed prefix --------------------------------------------------------

    def new_cache(self, batch: int, capacity: int, *, room: int | None = None, whole: bool = False) -> KVSlots:
        """Empty key/value slots for ``batch`` sequences of up to ``capacity`` rows each, ``room`` in all; ``whole`` as
        in `KVSlots`.

        Raises:
            ValueError: batch or capacity below 1, or a target whose tree forwards are not exact.
        """
        return KVSlots(batch, capacity, self._tree_layout, room=room, whole=whole)

    @property
    def kv_row_bytes(self) -> int | None:
        """Keys and values of one row in all layers; None where the family does not tell before a forward pass."""
        if self._tree_layout is None:
            return None
        numbers = sum(kh * kw + vh * vw for kh, kw, vh, vw in self._tree_layout)
        return numbers * self.dtype.itemsize

    @no_grad
    def forward_rows(
        self,
        tokens_BN: Tensor,
        position_BN: Tensor | None,
        cache: KVSlots,
        *,
        ancestor_BNN: Tensor | None = None,
        taps: Sequence[Tap] = (),
        count_B: Sequence[int] | None = None,
        logits: Literal["all", "last"] = "all",
        planned: Callable[[], None] | None = None,
        compiled: bool = False,
        recordings: Recordings | None = None,
        length_B: Tensor | None = None,
    ) -> RowsOutput:
        """Append N provisional rows to each sequence and return their logits and features.

        The rows stay provisional until ``cache.commit`` or ``cache.discard``. Committed slot s is
        position s.

        Args:
            tokens_BN: token ids; anything in padding rows.
            position_BN: position of each row (length + depth in a tree). None: a chain,
                ``length + n``.
            cache: from `new_cache`; its committed slots are visible to every row.
            ancestor_BNN: bool, ``[b, n, m]``: row n sees row m (itself included). None: causal.
            taps: features to return beside the logits.
            count_B: real rows per sequence when prompts are ragged; later rows are padding.
            logits: ``"last"`` runs the head on the last real row of each sequence only
                ([B, 1, V]), for prompts.
            planned: called when slots and masks are ready, just before the decoder runs.
            compiled: run the decoder through `torch.compile`, once per shape; the cache must be ``whole``.
            recordings: replay masks, decoder and head, recorded once per shape; the cache must be ``whole``, and what
                is returned is written over by the next such call.
            length_B: int64, ``cache.lengths`` on the device; for recordings.

        Raises:
            ValueError: shapes, ids or positions outside what the target has, or a full cache.
        """
        taps = validate_taps(taps, self.num_layers)
        B, N = inputs.check_rows(tokens_BN, position_BN, ancestor_BNN, cache.batch, count_B)
        if count_B is None and tokens_BN.device.type == "cpu":  # ragged rows hold padding
            inputs.check_tokens(tokens_BN, None, self.embedding_size, "forward_rows")
        longest = max(cache.lengths)
        plan = cache.begin(N, count_B, self.device, length_B if recordings is not None else None)
        if recordings is not None:
            return self._recorded_rows(recordings, tokens_BN, position_BN, ancestor_BNN, cache, taps, planned)
        try:
            if position_BN is None:
                position_BN = plan.chain_positions()
            if plan.real_BN is not None:
                tokens_BN = tokens_BN.masked_fill(~plan.real_BN, 0)
                position_BN = position_BN.masked_fill(~plan.real_BN, 0)
            if longest + N > self.max_positions:
                inputs.check_positions(position_BN, self.max_positions)
            mask = self._mask(plan, ancestor_BNN, position_BN)
            if planned is not None:
                planned()
            if compiled:
                assert cache.whole
                rows = inputs.regular(tokens_BN), inputs.regular(position_BN)
                final_BNd, tapped = self._compiled_rows(*rows, mask, cache, tuple(taps))
            else:
                with self._wiring.tapping(taps) as tapped:
                    final_BNd = self._wiring.run(tokens_BN, position_BN, mask, cache)
        except BaseException:
            cache.discard()
            raise
        features = {tap: final_BNd if tap == FINAL else tapped[tap] for tap in taps}
        if logits == "last":
            last_B = on_device([max(c, 1) - 1 for c in plan.counts], self.device)
            final_BNd = final_BNd[torch.arange(B, device=self.device), last_B][:, None]
        return RowsOutput(self.lm_head(final_BNd), features)

    # --- internals ----------------------------------------------------------------------------

    def _recorded_rows(
        self,
        recordings: Recordings,
        tokens_BN: Tensor,
        position_BN: Tensor | None,
        ancestor_BNN: Tensor | None,
        cache: KVSlots,
        taps: Sequence[Tap],
        planned: Callable[[], None] | None,
    ) -> RowsOutput:
        plan, N = cache.plan, tokens_BN.shape[1]
        if planned is not None:
            planned()

        def rows(
            tokens_BN: Tensor, position_BN: Tensor, length_B: Tensor, ancestor_BNN: Tensor | None
        ) -> tuple[Tensor, dict[Tap, Tensor]]:
            cache.discard()
            mask = self._mask(cache.begin(N, None, self.device, length_B), ancestor_BNN, position_BN)
            with self._wiring.tapping(taps) as tapped:
                final_BNd = self._wiring.run(tokens_BN, position_BN, mask, cache)
            return self.lm_head(final_BNd), {tap: final_BNd if tap == FINAL else tapped[tap] for tap in taps}

        try:
            position_BN = plan.chain_positions() if position_BN is None else position_BN
            inputs_of = tokens_BN, position_BN, plan.lengths_B, ancestor_BNN
            found = recordings.call((id(cache), cache.batch, tuple(taps)), rows, *inputs_of)
            cache.plan = plan
        except BaseException:
            cache.discard()
            raise
        return RowsOutput(*found)

    def _mask(self, plan: SlotPlan, ancestor_BNN: Tensor | None, position_BN: Tensor) -> Tensor | dict[str, Tensor]:
        if not self._masks.by_position and plan.start is not None:
            return self._masks.ready(plan.bias(ancestor_BNN, self.dtype))
        allowed_BNK = plan.visibility(ancestor_BNN)
        key_position_BK = plan.key_positions(position_BN) if self._masks.by_position else position_BN
        return self._masks.additive(allowed_BNK, position_BN, key_position_BK, self.dtype)

    @torch.no_grad()
    def _ask(self) -> tuple[float, probe.HeadForm]:
        """The four-token self-check: see `eaglelab.target.probe`."""
        name = type(self.model).__name__
        tokens_BS = probe.question(self.vocab_size, self.device)
        index_BS = torch.arange(4, device=self.device).expand(2, 4)
        own_BSV = self.model(input_ids=tokens_BS, position_ids=index_BS, use_cache=False).logits
        probe.check_finite(self.model, own_BSV)
        with self._wiring.tapping(tuple(range(self.num_layers))) as tapped:
            final_BSd = self._wiring.run(tokens_BS, index_BS, None, None)
        probe.check_streams(tapped, final_BSd, name)
        probe.check_causal(own_BSV, name)
        embedded_BSd = self._wiring.embedding(tokens_BS)
        scale = probe.embedding_scale(self.text_config, embedded_BSd, tapped[0], name)
        raw_BSV = self._wiring.head(final_BSd)
        return scale, probe.head_form(self.text_config, raw_BSV, own_BSV, name)

    @cached_property
    def _compiled_rows(self) -> Callable[..., tuple[Tensor, dict[Tap, Tensor]]]:
        one_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        # the library installs its hooks for hidden states at their first use, under a lock that no graph can hold
        self.decoder(input_ids=one_11, use_cache=False, output_hidden_states=True)
        return torch.compile(self._wiring.rows, dynamic=False)

    @cached_property
    def _tree_layout(self) -> tuple[LayerShape, ...] | None:
        """Key/value shapes per layer, learnt while checking once that trees are exact here."""
        return probe.check_tree(self)


def _expect_nothing(module: FrozenTarget, keys: Any) -> None:
    """After loading a parent's state dict: the target's weights were never meant to be in it."""
    keys.missing_keys[:] = [k for k in keys.missing_keys if not k.startswith(module._prefix)]
