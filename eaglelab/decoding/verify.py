"""Verification: which drafted nodes the target confirms. Pure functions of tensors.

Letters: B batch, R flat rows (root first), V vocabulary, L rows of a path (deepest level + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eaglelab.decoding.tree import FlatTree


@dataclass(frozen=True)
class Decision:
    """What one verification decided, still on the device.

    accepted_B: accepted draft tokens.
    rows_BL: flat rows of the accepted path, the root's first; `accepted + 1` of them are real.
    published_BL: the accepted tokens, then the frontier token; `accepted + 1` of them are real.
        The frontier token was chosen by the target but is no verified row: its K/V and feature
        come with the next forward.
    """

    accepted_B: Tensor
    rows_BL: Tensor
    published_BL: Tensor

    def to_host(self) -> HostDecision:
        """Bring the real entries to the host. The one host sync of a round."""
        packed = torch.cat([self.accepted_B[:, None], self.rows_BL, self.published_BL], dim=1)
        L = self.rows_BL.shape[1]
        rows, published = [], []
        for accepted, *line in packed.tolist():
            rows.append(line[: accepted + 1])
            published.append(line[L : L + accepted + 1])
        return HostDecision(rows, published)


@dataclass(frozen=True)
class HostDecision:
    """A `Decision` without its padding: per sequence `accepted + 1` rows and published tokens."""

    rows: list[list[int]]
    published: list[list[int]]


def greedy(logits_BRV: Tensor, flat: FlatTree) -> Decision:
    """Accept the longest path that follows the target's argmax, then take the argmax at its end.

    Equal logits resolve to the lowest id, as `torch.argmax` does; half-precision logits compare
    as their float32 values would, so they need no conversion. Siblings carry different tokens,
    hence the accepted rows form one path. Source: contracts, section 6.
    """
    tree = flat.topology
    best_BR = logits_BRV.argmax(dim=-1)
    B, R = best_BR.shape
    if R == 1:
        return Decision(best_BR.new_zeros(B), best_BR.new_zeros(B, 1), best_BR)
    parent_BR = tree.parent_BR.expand(B, -1)
    follows_BR = flat.tokens_BR == best_BR.gather(1, parent_BR)
    follows_BR[:, 0] = True
    accepted_BR = (follows_BR[:, None, :] | ~tree.ancestor_BRR).all(dim=-1)
    depth_BR = tree.depth_BR * accepted_BR
    accepted_B, deepest_B = depth_BR.max(dim=1)
    rows_BL = _path_to(deepest_B, tree.path_BRL)
    return Decision(accepted_B, rows_BL, best_BR.gather(1, rows_BL))


def _path_to(row_B: Tensor, path_BRL: Tensor) -> Tensor:
    L = path_BRL.shape[-1]
    path_BRL = path_BRL.expand(row_B.shape[0], -1, -1)
    return path_BRL.gather(1, row_B[:, None, None].expand(-1, 1, L)).squeeze(1)
