"""What a record of a round holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

PHASES = ("draft", "pack", "verify", "commit")

# Any value may be None.
FIELDS: dict[str, Any] = {
    "request": int,
    "round": int,
    "batch": int,  # sequences that shared the round
    "expanded": int,  # draft nodes that were looked at
    "drafted": int,  # draft nodes that were retained
    "verified": int,  # rows of the target's forward pass, the root included
    "accepted": int,  # draft tokens accepted and published
    "reached": int,  # level of the deepest accepted node, published or not
    "published": int,  # tokens added to the output
    "published_tokens": list[int],
    "published_text": list[str],  # what each adds to the answer's text; empty where a character is unfinished
    "stop_reason": str,
    **{f"{phase}_s": float for phase in PHASES},
    "target_kv_bytes": int,  # rows that the round wrote for its tree, whether kept or not
    "draft_kv_bytes": int,
    "depth": list[int],  # of each drafted node; 1: a child of the root
    "confidence": list[float],  # exp(log value) of each drafted node's path
    "node_accepted": list[bool],
    "experts_union": list[int],  # per mixture layer: experts touched by all rows of the sequence
    "experts_root": list[int],  # by the root row alone
    "root_token": int,  # published before the round; the tree grows from it
    "root_text": str,
    "node_token": list[int],
    "node_text": list[str],
    "node_parent": list[int],  # row of each node's parent; row 0 is the root, row i + 1 node i
    "node_forwarded": list[bool],  # the drafter was run on the node, to propose children
    "dropped_token": list[int],  # of the best candidates that were looked at and not kept, best first; 32 at most
    "dropped_text": list[str],
    "dropped_parent": list[int],  # rows as above; those of dropped candidates follow the tree's
    "dropped_confidence": list[float],
    "prompt": str,  # the question, in the first record of an answer
}
