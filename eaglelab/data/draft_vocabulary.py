"""The draft vocabulary of EAGLE-3: the target tokens that the drafter can propose.

Letters: V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class DraftVocabulary:
    """A sorted subset of the target's tokens with its two maps.

    Attributes:
        ids_K: int64 target ids, ascending.
        target_size: V.
    """

    def __init__(self, ids_K: Tensor, target_size: int) -> None:
        """Raises ValueError unless the ids are distinct, ascending and inside the target's vocabulary."""
        ids_K = torch.as_tensor(ids_K, dtype=torch.int64)
        in_range = ids_K.numel() > 0 and int(ids_K[0]) >= 0 and int(ids_K[-1]) < target_size
        if ids_K.dim() != 1 or not in_range or not (ids_K.diff() > 0).all():
            raise ValueError(f"draft vocabulary ids must ascend strictly inside [0, {target_size})")
        self.ids_K = ids_K
        self.target_size = target_size

    @classmethod
    def most_frequent(cls, counts_V: Tensor, size: int) -> DraftVocabulary:
        """The ``size`` most frequent ids; ties, unseen ids among them, go to the lower id.

        Args:
            counts_V: how often each target id occurs among the *supervised* tokens of the training split.
            size: K.

        Raises:
            ValueError: K outside 1..V.
        """
        V = counts_V.numel()
        if not 1 <= size <= V:
            raise ValueError(f"variant.draft_vocab_size={size} must be between 1 and the target's vocabulary of {V}")
        order = counts_V.to(torch.int64).argsort(descending=True, stable=True)
        return cls(order[:size].sort().values, V)

    @property
    def d2t(self) -> Tensor:
        """int64 [K], an *offset*: draft id ``i`` is target id ``i + d2t[i]`` (the published convention)."""
        return self.ids_K - torch.arange(self.ids_K.numel())

    @property
    def t2d(self) -> Tensor:
        """bool [V], which target ids are in the draft vocabulary."""
        mask_V = torch.zeros(self.target_size, dtype=torch.bool)
        mask_V[self.ids_K] = True
        return mask_V

    @property
    def digest(self) -> str:
        """sha256 of the map: a trained head belongs to exactly one."""
        return hashlib.sha256(self.ids_K.numpy().tobytes() + str(self.target_size).encode()).hexdigest()

    def coverage(self, counts_V: Tensor) -> float:
        """Share of counted tokens that the drafter can propose, 0 to 1."""
        return float(counts_V[self.ids_K].sum() / counts_V.sum().clamp(min=1))
