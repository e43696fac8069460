"""A drafter that does all of its work and whose proposals are accepted as a script says: speed without trained weights.

Letters: B sequences (one), W frontier nodes, V draft vocabulary, d hidden width, L levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from eaglelab.decoding import TreePolicy
from eaglelab.decoding.policies.dynamic import DynamicTree
from eaglelab.decoding.policies.fixed import FixedTree
from eaglelab.drafters import SlotDrafter
from eaglelab.drafters.runtime import DraftState
from eaglelab.ops import on_device


class ScriptedDrafter(SlotDrafter):
    """A drafter whose own network and head run, before some of its log-probabilities are written over.

    In each round the continuation of the text is made the most likely path, as deep as the script says, and what would
    follow impossible. Every tree here keeps the most likely child of the most likely path, and forwards it as the first
    node of its level, so that nothing but the first row of a level has to be written to.

    Args:
        drafter: does the work.
        text: token ids, prompt included, as the target itself goes on with it.
        accepted: tokens to accept, round by round, from the beginning again when they are used up.

    Attributes:
        calls: of ``extend``, ``step`` and ``log_probs`` since the slots were made or emptied.
    """

    def __init__(self, drafter: SlotDrafter, text: Sequence[int], accepted: Sequence[int]) -> None:
        super().__init__(drafter.network, drafter.target, drafter.taps)
        self.text, self.accepted = list(text), list(accepted)
        every_V = torch.arange(self._vocabulary, device=self.target.device)
        self._draft_ids = {id: place for place, id in enumerate(self.to_target_ids(every_V).tolist())}
        L = max(accepted) + 1
        self._id_L = torch.zeros(L, dtype=torch.int64, device=self.target.device)
        self._wanted_L = torch.zeros(L, dtype=torch.bool, device=self.target.device)
        self._barred_L = torch.zeros(L, dtype=torch.bool, device=self.target.device)
        self._levels = list(zip(*(x_L.split(1) for x_L in (self._id_L, self._wanted_L, self._barred_L)), strict=True))
        self._begin()

    @property
    def _vocabulary(self) -> int:
        config = self.network.config
        return config.draft_vocab_size or config.vocab_size

    def _begin(self) -> None:
        self.calls = {"extend": 0, "step": 0, "log_probs": 0}
        self._round, self._level = -1, 0

    def new_state(self, batch: int, capacity: int, room: int | None = None) -> DraftState:
        """As before; the script begins anew.

        Raises:
            ValueError: several sequences.
        """
        if max(batch, room or 0) != 1:
            raise ValueError(f"a script is for one sequence, and {max(batch, room or 0)} are to be decoded")
        self._begin()
        like = next(self.network.parameters())
        return _ScriptedSlots(self, DraftState(self.network.config, batch, capacity, like, room))

    def extend(
        self,
        state: DraftState,
        features_BNF: Tensor,
        tokens_BN: Tensor,
        position_BN: Tensor,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        hidden_BNd = super().extend(state, features_BNF, tokens_BN, position_BN, counts)
        self.calls["extend"] += 1
        self._round += 1
        self.begin_draft()
        self._write_script(*state.lengths)
        return hidden_BNd

    def begin_draft(self) -> None:
        """The next log-probabilities are the root's."""
        self._level = 0

    def _write_script(self, frontier: int) -> None:
        """Give the device this round's ids, level by level: drafts that are recorded read them there.

        Raises:
            ValueError: the text to be drafted is not in the draft vocabulary.
        """
        depth, L = self.accepted[self._round % len(self.accepted)], len(self._id_L)
        places = range(frontier + 1, frontier + 1 + L)
        ids = [self._draft_ids.get(self.text[place]) if place < len(self.text) else None for place in places]
        for place, draft_id in zip(places[:depth], ids, strict=False):
            if draft_id is None:
                token = self.text[place] if place < len(self.text) else None
                raise ValueError(f"token {token} at place {place} of the text cannot be drafted; script a shorter text")
        device = self.target.device
        self._id_L.copy_(on_device([0 if one is None else one for one in ids], device))
        self._wanted_L.copy_(on_device([level < depth for level in range(L)], device))
        self._barred_L.copy_(on_device([level == depth and one is not None for level, one in enumerate(ids)], device))

    def step(
        self,
        state: DraftState,
        hidden_BWd: Tensor,
        tokens_BW: Tensor,
        position_BW: Tensor,
        ancestor_BWP: Tensor | None = None,
    ) -> Tensor:
        self.calls["step"] += 1
        return super().step(state, hidden_BWd, tokens_BW, position_BW, ancestor_BWP)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """[B, W, d] -> [B, W, V]; what belongs to the script is written into the first row."""
        log_p_BWV = super().log_probs(hidden)
        self.calls["log_probs"] += 1
        level, self._level = self._level, self._level + 1
        if level < len(self._levels):
            id_1, wanted_1, barred_1 = self._levels[level]
            row_V = log_p_BWV[0, 0]
            row_V -= wanted_1.to(row_V.dtype)  # a drafter may be certain, and then ties would decide
            own_1 = row_V.gather(0, id_1).masked_fill(barred_1, -torch.inf)
            row_V.scatter_(0, id_1, own_1.masked_fill(wanted_1, 0.0))
        return log_p_BWV


class _ScriptedSlots(DraftState):
    """The slots of one sequence; a draft that is recorded begins at the root each time it is run."""

    def __init__(self, drafter: ScriptedDrafter, slots: DraftState) -> None:
        vars(self).update(vars(slots))
        self._drafter = drafter

    def reset(self, batch: int) -> None:
        self._drafter._begin()
        super().reset(batch)

    @contextmanager
    def fixed_at(self, length_B1: Tensor) -> Iterator[None]:
        self._drafter.begin_draft()
        with super().fixed_at(length_B1):
            yield


def levels_of(tree: TreePolicy) -> int:
    """How many levels of a tree are drafted in every round."""
    if isinstance(tree, DynamicTree):
        return tree.max_depth
    assert isinstance(tree, FixedTree)
    return len(tree.levels)


def deepest_script(tree: TreePolicy) -> int:
    """How many tokens a script can have accepted in a round: the length of the path of most likely children.

    Raises:
        ValueError: a tree whose nodes are drawn at random.
    """
    if isinstance(tree, DynamicTree):
        return tree.max_depth
    if not isinstance(tree, FixedTree) or tree.samples:
        raise ValueError(f"tree={tree.name}: a script is for chain, static and dynamic trees")
    return max((len(path) for path in tree.paths if not any(path)), default=0)


def most_children(tree: TreePolicy) -> int:
    """Of one node, the unlikely ones in front of a kept one included."""
    if isinstance(tree, DynamicTree):
        return tree.width
    assert isinstance(tree, FixedTree)
    return max(level.top_k for level in tree.levels)
