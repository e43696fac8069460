"""The dependency graph of a rollout, written down literally, and attention over it in one dense softmax.

A node is (step, sequence, row slot). Step 0 nodes are target-derived rows; a node of step s >= 1 is the draft state
of its root after s steps. Slow and obvious on purpose.
"""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Node:
    step: int
    slot: int
    segment: int
    legal: bool

    def is_legal_target_prefix_of(self, query: "Node") -> bool:
        return (
            self.step == 0 and self.legal and query.legal and self.segment == query.segment and self.slot <= query.slot
        )

    def is_draft_ancestor_of(self, query: "Node") -> bool:
        return 1 <= self.step < query.step and self.slot == query.slot

    def sees(self, key: "Node") -> bool:
        return key.is_legal_target_prefix_of(self) or key.is_draft_ancestor_of(self) or key == self


def nodes(rows, b: int, steps: int) -> list[Node]:
    return [
        Node(step, r, int(rows.segment_BR[b, r]), bool(rows.legal_BR[b, r]))
        for step in range(steps + 1)
        for r in range(rows.legal_BR.shape[1])
    ]


def dense_rollout_attention(rows, q, k, v):
    """q [steps + 1, B, H, R, D], k, v [steps + 1, B, G, R, D] -> [steps + 1, B, H, R, D]."""
    steps, B, H, R, D = q.shape[0] - 1, *q.shape[1:]
    spread = H // k.shape[2]
    out = []
    for b in range(B):
        graph = nodes(rows, b, steps)
        sees = torch.tensor([[query.sees(key) for key in graph] for query in graph])
        Q, K, V = (x[:, b].transpose(0, 1).reshape(x.shape[2], (steps + 1) * R, D) for x in (q, k, v))
        K, V = (x.repeat_interleave(spread, 0) for x in (K, V))
        score = (Q @ K.mT) / D**0.5
        weight = score.masked_fill(~sees, -torch.inf).softmax(-1)
        out.append((weight @ V).reshape(H, steps + 1, R, D).transpose(0, 1))
    return torch.stack(out, dim=1)
