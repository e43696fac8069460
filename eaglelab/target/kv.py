"""Key/value slots: preallocated buffers with one length per sequence.

Letters: B batch, H heads, C capacity, N new rows, A accepted rows, K visible key slots, hd head
width.

A forward pass writes N *provisional* rows of sequence b into the slots ``lengths[b] + n``.
``commit`` keeps the accepted ones, moved together so that committed slot s always holds the token
at position s; ``discard`` forgets them all. Nothing is ever concatenated. Every layer keeps full
length, sliding-window layers too: the window is the mask's business. Sequences come and go by ``join``
and ``select``; those in use are always the leading ones of the buffers, so that no forward pass
carries empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from eaglelab.ops import on_device

LayerShape = tuple[int, int, int, int]  # key heads, key width, value heads, value width


@dataclass(frozen=True)
class SlotPlan:
    """Where the rows of one forward pass go and what they may see.

    ``start`` is set when one slice serves every sequence (always for B = 1); otherwise
    ``slots_BN`` names the slot of each row, and padding rows, those not in ``real_BN``, share the
    spare slot ``capacity``.
    """

    rows: int
    counts: tuple[int, ...]
    visible: int
    start: int | None
    device: torch.device | str
    lengths_B: Tensor | None = None
    slots_BN: Tensor | None = None
    real_BN: Tensor | None = None

    def chain_positions(self) -> Tensor:
        """Positions of N rows in a line after the committed tokens, [B, N]."""
        if self.start is not None:
            end = self.start + self.rows
            return torch.arange(self.start, end, device=self.device).expand(len(self.counts), -1)
        assert self.lengths_B is not None
        return self.lengths_B[:, None] + torch.arange(self.rows, device=self.device)

    def visibility(self, ancestor_BNN: Tensor | None) -> Tensor:
        """Bool [B, N, K]: each row sees its sequence's committed slots and its ancestors.

        Padding rows always see slot 0, so that no softmax is empty. None: causal among the rows.
        """
        device, B, N = self.device, len(self.counts), self.rows
        if ancestor_BNN is None:
            ancestor_BNN = torch.ones(N, N, dtype=torch.bool, device=device).tril_().expand(B, N, N)
        if self.start is not None:
            allowed_BNK = torch.ones(B, N, self.visible, dtype=torch.bool, device=device)
            allowed_BNK[:, :, self.start :] = ancestor_BNN
            return allowed_BNK
        assert self.lengths_B is not None
        assert self.slots_BN is not None
        assert self.real_BN is not None
        # One column more than visible: where padding rows leave their bit. Dropped at the end.
        columns_K = torch.arange(self.visible + 1, device=device)
        committed_B1K = columns_K[None, None] < self.lengths_B[:, None, None]
        allowed_BNK = committed_B1K.expand(B, N, -1).clone()
        slots_BNN = self.slots_BN.clamp(max=self.visible)[:, None].expand(B, N, N)
        allowed_BNK.scatter_(2, slots_BNN, ancestor_BNN.to(torch.bool))
        allowed_BNK[:, :, 0] |= ~self.real_BN
        return allowed_BNK[:, :, : self.visible]

    def bias(self, ancestor_BNN: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``visibility`` as an additive mask, [B or 1, 1, N, K], where one slice serves every sequence.

        Committed slots are open to every row, so only the N by N corner of the new rows is looked at.
        """
        assert self.start is not None
        N = self.rows
        if N == 1:
            return torch.zeros(1, 1, 1, self.visible, dtype=dtype, device=self.device)
        if ancestor_BNN is None:
            ancestor_BNN = torch.ones(1, N, N, dtype=torch.bool, device=self.device).tril_()
        bias_B1NK = torch.zeros(ancestor_BNN.shape[0], 1, N, self.visible, dtype=dtype, device=self.device)
        bias_B1NK[..., self.start :].masked_fill_(~ancestor_BNN.to(torch.bool)[:, None], torch.finfo(dtype).min)
        return bias_B1NK

    def key_positions(self, position_BN: Tensor) -> Tensor:
        """Positions of the visible slots, [B, K]: committed slot s is position s."""
        B = position_BN.shape[0]
        position_BK = torch.arange(self.visible + 1, device=position_BN.device).repeat(B, 1)
        if self.start is not None:
            position_BK[:, self.start : self.visible] = position_BN
        else:
            assert self.slots_BN is not None
            position_BK.scatter_(1, self.slots_BN.clamp(max=self.visible), position_BN)
        return position_BK[:, : self.visible]


def closing_order(alive: Sequence[bool]) -> list[int]:
    """Which sequence stands in each place once the others are gone, with the fewest moves.

    Those that stay keep their place, as far as there are places; the last ones fill the holes.
    """
    order = [b for b, stays in enumerate(alive) if stays]
    places = len(order)
    fillers = [b for b in order if b >= places]
    return [b if alive[b] else fillers.pop() for b in range(places)]


def moves(order: Sequence[int]) -> list[tuple[int, int]]:
    """(new place, old place) of every sequence that moves; they can be copied one after the other."""
    assert all(old >= new for new, old in enumerate(order)), "sequences move towards the front"
    assert len(set(order)) == len(order)
    return [(new, old) for new, old in enumerate(order) if old != new]


class KVSlots(Cache):
    """A transformers cache with per-sequence lengths, provisional rows and commit by index.

    Args:
        batch: number of sequences.
        capacity: slots per sequence: committed tokens plus the largest tree.
        layer_shapes: head counts and widths per layer, when known; layers of one shape then share
            one buffer and a commit is one gather for all of them.
        room: most sequences that will be here at once; None: ``batch``.
        whole: every pass sees all slots and writes by index, so that its shapes do not depend on the lengths (for
            `torch.compile`); the mask hides what is not committed.

    Raises:
        ValueError: batch or capacity below 1.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        layer_shapes: Sequence[LayerShape] | None = None,
        *,
        room: int | None = None,
        whole: bool = False,
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"KV slots need batch >= 1 and capacity >= 1, got batch={batch}, capacity={capacity}.")
        super().__init__(layers=[])
        self.batch = batch
        self.room = max(batch, room or 0)
        self.capacity = capacity
        self.whole = whole
        self.lengths: list[int] = [0] * batch
        self._shapes = tuple(layer_shapes) if layer_shapes is not None else None
        self._pools: list[Tensor] = []  # each [layers sharing a shape, B, H, C + 1, hd]
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._places: dict[int, tuple[int, int, int, int]] = {}  # layer -> pool and place in it of keys, of values
        self._plan: SlotPlan | None = None
        self._views: list[_PoolViews] = []  # of the plan, where one slice serves every sequence

    @property
    def plan(self) -> SlotPlan:
        """Of the provisional rows."""
        assert self._plan is not None, "begin() first"
        return self._plan

    @plan.setter
    def plan(self, plan: SlotPlan) -> None:
        self._plan = plan

    def __repr__(self) -> str:
        return f"KVSlots(batch={self.batch}, capacity={self.capacity}, lengths={self.lengths})"

    @property
    def pending(self) -> int:
        """Provisional rows per sequence that wait for commit or discard."""
        return self._plan.rows if self._plan is not None else 0

    def lengths_B(self, device: torch.device | str = "cpu") -> Tensor:
        """Committed lengths as an int64 tensor."""
        return on_device(self.lengths, device)

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, views of [B, H, C, hd]; only committed slots mean anything."""
        B, C = self.batch, self.capacity
        return self._keys[layer][:B, :, :C], self._values[layer][:B, :, :C]

    @property
    def row_bytes(self) -> int:
        """Keys and values of one row in all layers; 0 before the first forward pass."""
        return sum(pool.shape[0] * pool.shape[2] * pool.shape[4] * pool.element_size() for pool in self._pools)

    # --- one forward pass -------------------------------------------------------------------

    def begin(
        self,
        rows: int,
        counts: Sequence[int] | None,
        device: torch.device | str,
        lengths_B: Tensor | None = None,
    ) -> SlotPlan:
        """Plan the slots of the next forward pass: ``counts[b]`` real rows out of ``rows``.

        Args:
            lengths_B: the committed lengths where the device has them: a plan for ``whole`` slots and full rows, in
                which no number of the host's depends on them.

        Raises:
            ValueError: a sequence would grow past the capacity.
        """
        assert self._plan is None, "commit() or discard() the previous rows first"
        self._views = []
        counts = (rows,) * self.batch if counts is None else tuple(map(int, counts))
        assert len(counts) == self.batch
        assert all(0 <= c <= rows for c in counts)
        ends = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if max(ends) > self.capacity:
            b = ends.index(max(ends))
            raise ValueError(
                f"KV slots are full: sequence {b} holds {self.lengths[b]} tokens and {counts[b]} "
                f"more rows exceed the capacity of {self.capacity}. Ask new_cache() for at least "
                f"{ends[b]} slots, or stop the sequence earlier."
            )
        if min(counts) == rows and min(self.lengths) == max(self.lengths) and not self.whole:
            start = self.lengths[0]
            self._plan = SlotPlan(rows, counts, start + rows, start, device)
            return self._plan
        offset_1N = torch.arange(rows, device=device)[None]
        if lengths_B is not None:
            assert self.whole and min(counts) == rows
            real_BN = torch.ones(self.batch, rows, dtype=torch.bool, device=device)
        else:
            lengths_B = self.lengths_B(device)
            real_BN = offset_1N < on_device(counts, device)[:, None]
        slots_BN = torch.where(real_BN, lengths_B[:, None] + offset_1N, self.capacity)
        visible = self.capacity if self.whole else max(1, *ends)
        self._plan = SlotPlan(rows, counts, visible, None, device, lengths_B, slots_BN, real_BN)
        return self._plan

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: write [B, H, N, hd], return the visible [B, H, K, hd]."""
        plan = self._plan
        assert plan is not None, "begin() plans the slots before the model runs"
        if layer_idx not in self._keys:
            self._allocate(layer_idx, key_states, value_states)
        if plan.start is not None:
            # three views per pool and pass, not six per layer: on a CPU they would cost as much as the copies
            while len(self._views) < len(self._pools):
                self._views.append(_PoolViews(self._pools[len(self._views)], self.batch, plan.start, plan.visible))
            key_pool, key, value_pool, value = self._places[layer_idx]
            keys, values = self._views[key_pool], self._views[value_pool]
            keys.new[key].copy_(key_states)
            values.new[value].copy_(value_states)
            return keys.visible[key], values.visible[value]
        keys_BHCh, values_BHCh = self._keys[layer_idx][: self.batch], self._values[layer_idx][: self.batch]
        assert plan.slots_BN is not None
        batch_B1 = torch.arange(self.batch, device=key_states.device)[:, None]
        keys_BHCh[batch_B1, :, plan.slots_BN] = key_states.transpose(1, 2)
        values_BHCh[batch_B1, :, plan.slots_BN] = value_states.transpose(1, 2)
        return keys_BHCh[:, :, : plan.visible], values_BHCh[:, :, : plan.visible]

    def commit(self, rows: Tensor | Sequence[Sequence[int]] | None, counts: Sequence[int]) -> None:
        """Keep ``counts[b]`` provisional rows of sequence b, in the given order, and advance.

        Args:
            rows: row indices within the rows just written, [B, A]; entries past ``counts[b]``
                are ignored. None keeps the leading rows (a prompt, a chain), without any copy.
            counts: accepted rows per sequence, 0 for none.

        Raises:
            ValueError: a count or an index lies outside the rows just written.
        """
        plan = self._plan
        assert plan is not None, "there are no provisional rows to commit"
        counts = [int(c) for c in counts]
        if len(counts) != self.batch or any(not 0 <= c <= n for c, n in zip(counts, plan.counts, strict=True)):
            raise ValueError(
                f"commit counts {counts} do not fit the rows just written ({list(plan.counts)} "
                "per sequence): give one count per sequence, at most its rows."
            )
        if rows is not None and max(counts) > 0:
            self._move(rows, counts, plan)
        self.lengths = [length + c for length, c in zip(self.lengths, counts, strict=True)]
        self._plan = None

    def discard(self) -> None:
        """Forget the provisional rows; committed slots stay."""
        self._plan = None

    def reset(self, batch: int | None = None) -> None:
        """Forget everything, keep the buffers; ``batch`` sequences come next."""
        self.batch = self.batch if batch is None else batch
        assert self.batch <= self.room
        self.lengths = [0] * self.batch
        self._plan = None

    # --- sequences come and go ----------------------------------------------------------------

    def join(self, other: KVSlots) -> None:
        """Copy the committed slots of ``other``'s sequences behind the sequences here.

        Raises:
            ValueError: no room for them, or one of them is longer than the capacity.
        """
        assert self._plan is None, "commit() or discard() first"
        first, end, longest = self.batch, self.batch + other.batch, max(other.lengths)
        if end > self.room or longest > self.capacity:
            raise ValueError(
                f"{other.batch} sequences of up to {longest} tokens do not fit beside {self.batch}: there is room for "
                f"{self.room} sequences of {self.capacity}."
            )
        assert len(self._pools) == len(other._pools), "caches of two targets"
        for mine, theirs in zip(self._pools, other._pools, strict=True):
            mine[:, first:end, :, :longest] = theirs[:, : other.batch, :, :longest]
        self.batch = end
        self.lengths = self.lengths + list(other.lengths)

    def select(self, order: Sequence[int]) -> None:
        """Keep the sequences ``order``, in that order; see :func:`closing_order`."""
        assert self._plan is None, "commit() or discard() first"
        for new, old in moves(order):
            for pool in self._pools:
                pool[:, new, :, : self.lengths[old]] = pool[:, old, :, : self.lengths[old]]
        self.lengths = [self.lengths[old] for old in order]
        self.batch = len(order)

    # --- what the library asks a cache --------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest committed length. Rows carry explicit positions, so models need not ask."""
        return max(self.lengths)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Visible key slots and their offset."""
        visible = self._plan.visible if self._plan is not None else max(self.lengths)
        return visible, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The capacity."""
        return self.capacity

    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Shapes seen so far, by layer; layers that share another's keys are left out at the end.

        Raises:
            AssertionError: layers in between were never written.
        """
        assert sorted(self._keys) == list(range(len(self._keys)))
        return tuple(
            (
                self._keys[i].shape[1],
                self._keys[i].shape[3],
                self._values[i].shape[1],
                self._values[i].shape[3],
            )
            for i in range(len(self._keys))
        )

    # --- internals ----------------------------------------------------------------------------

    def _allocate(self, layer_idx: int, key_BHNh: Tensor, value_BHNh: Tensor) -> None:
        """Zeroed buffers (a masked NaN would still poison a sum) with one spare slot at the end."""
        if self._shapes is None:
            first = len(self._pools)
            self._keys[layer_idx] = self._pool(1, key_BHNh.shape[1], key_BHNh.shape[3], key_BHNh)[0]
            self._values[layer_idx] = self._pool(1, value_BHNh.shape[1], value_BHNh.shape[3], value_BHNh)[0]
            self._places[layer_idx] = (first, 0, first + 1, 0)
            return
        entries: dict[tuple[int, int], list[tuple[bool, int]]] = {}
        for layer, (key_heads, key_width, value_heads, value_width) in enumerate(self._shapes):
            entries.setdefault((key_heads, key_width), []).append((True, layer))
            entries.setdefault((value_heads, value_width), []).append((False, layer))
        keys: dict[int, tuple[int, int]] = {}
        values: dict[int, tuple[int, int]] = {}
        for (heads, width), members in entries.items():
            number, pool = len(self._pools), self._pool(len(members), heads, width, key_BHNh)
            for index, (is_key, layer) in enumerate(members):
                (self._keys if is_key else self._values)[layer] = pool[index]
                (keys if is_key else values)[layer] = number, index
        self._places = {layer: (*keys[layer], *values[layer]) for layer in keys}
        assert self._keys[layer_idx].shape[1::2] == key_BHNh.shape[1::2]

    def _pool(self, layers: int, heads: int, width: int, like: Tensor) -> Tensor:
        pool = like.new_zeros(layers, self.room, heads, self.capacity + 1, width)
        self._pools.append(pool)
        return pool

    def _move(self, rows: Tensor | Sequence[Sequence[int]], counts: list[int], plan: SlotPlan) -> None:
        device = self._pools[0].device
        if isinstance(rows, Tensor):
            if rows.ndim != 2 or rows.shape[0] != self.batch or rows.shape[1] < max(counts):
                raise ValueError(
                    f"commit rows have shape {tuple(rows.shape)}, expected [{self.batch}, at least "
                    f"{max(counts)}]: one line of accepted row indices per sequence."
                )
            rows = rows.tolist()
        accepted = [list(line[:count]) for line, count in zip(rows, counts, strict=True)]
        for b, line in enumerate(accepted):
            if len(line) != counts[b] or any(not 0 <= r < plan.counts[b] for r in line):
                raise ValueError(
                    f"commit rows {line} of sequence {b} are not {counts[b]} indices below "
                    f"{plan.counts[b]}, the rows just written."
                )
        moved = [line != list(range(len(line))) for line in accepted]
        if not any(moved):
            return
        if self.batch == 1:
            first, line = self.lengths[0], accepted[0]
            source_A = on_device([first + r for r in line], device)
            for pool in self._pools:
                pool[:, :, :, first : first + len(line)] = pool.index_select(3, source_A)
            return
        width = max(counts)
        spare = self.capacity
        source = [
            [length + r for r in line] + [spare] * (width - len(line))
            for length, line in zip(self.lengths, accepted, strict=True)
        ]
        target = [
            [length + a for a in range(len(line))] + [spare] * (width - len(line))
            for length, line in zip(self.lengths, accepted, strict=True)
        ]
        batch_B1 = torch.arange(self.batch, device=device)[:, None]
        source_BA = on_device(source, device)
        target_BA = on_device(target, device)
        for pool in self._pools:
            pool[:, batch_B1, :, target_BA] = pool[:, batch_B1, :, source_BA]


class KeepNothing(Cache):
    """The cache of a pass over whole sequences: hands every layer its own keys and values, and forgets them.

    Without a cache the library asks the device whether positions restart within a row, and the host waits for that.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class _PoolViews:
    """A pool's slots of one pass, layer by layer: those of the new rows and all visible ones."""

    def __init__(self, pool: Tensor, batch: int, start: int, end: int) -> None:
        used = pool[:, :batch, :, :end]
        self.visible = used.unbind(0)
        self.new = used[:, :, :, start:].unbind(0)
