"""One-step and chained draft accuracy under every hypothesis, conversation by conversation.

Letters: H hypotheses, P conversations, K chain depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from eaglelab.data.batch import Batch
from eaglelab.data.rows import compile_rows
from eaglelab.doctor.hypotheses import Hypothesis
from eaglelab.doctor.wiring import Address, read_streams
from eaglelab.drafters import DraftNetwork
from eaglelab.target import FrozenTarget
from eaglelab.variants.simulation import ChainSimulation


@dataclasses.dataclass(frozen=True)
class Examination:
    """Counts of roots and hits.

    Attributes:
        hypotheses: H of them, the declared wiring first.
        roots_P: int64, chains that start in each conversation.
        prefix_hits_HPK: int64, chains that agree with the target in their first k + 1 steps.
        step_hits_HPK: int64, chains that agree in step k + 1, whatever came before.
    """

    hypotheses: Sequence[Hypothesis]
    roots_P: NDArray[np.int64]
    prefix_hits_HPK: NDArray[np.int64]
    step_hits_HPK: NDArray[np.int64]

    @property
    def tau_H(self) -> NDArray[np.float64]:
        """Simulated acceptance length, pooled over conversations."""
        return 1 + self.prefix_hits_HPK.sum((1, 2)) / self.roots_P.sum()

    @property
    def one_step_H(self) -> NDArray[np.float64]:
        """Share of rows whose next token the drafter gets right in one step."""
        return self.step_hits_HPK[:, :, 0].sum(1) / self.roots_P.sum()


@torch.no_grad()
def examine(
    network: DraftNetwork,
    target: FrozenTarget,
    hypotheses: Sequence[Hypothesis],
    conversations: Iterable[tuple[Sequence[int], int]],
    *,
    depth: int = 5,
) -> Examination:
    """Roll the drafter out along the conversations under every hypothesis.

    Args:
        conversations: token ids, and how many of them are the prompt; the rest should be the target's own greedy
            answer, so that simulated acceptance is that of decoding. Longer bars: wrap it in ``tqdm``.
        depth: of the chain.

    Raises:
        ValueError: no conversation has an answer longer than the chain.
    """
    networks = [one.wiring.network(network) for one in hypotheses]
    addresses: set[Address] = {tap for one in hypotheses for tap in one.wiring.taps}
    roots: list[int] = []
    prefix: list[list[list[int]]] = []
    steps: list[list[list[int]]] = []
    for ids, prompt_length in conversations:
        batch = conversation_batch(ids, prompt_length)
        streams = read_streams(target, batch, addresses)
        found = []
        for one, wired in zip(hypotheses, networks, strict=True):
            chain = ChainSimulation(depth)
            chain.update(wired, one.wiring.view(batch, target, streams))
            found.append(chain)
        if found[0].roots:
            roots.append(int(found[0].roots))
            prefix.append([chain.prefix_hits.long().tolist() for chain in found])
            steps.append([chain.step_hits.long().tolist() for chain in found])
    if not roots:
        raise ValueError(f"no answer is longer than {depth} tokens: give other prompts, or a lower depth")
    hits = [np.array(one, dtype=np.int64).transpose(1, 0, 2) for one in (prefix, steps)]
    return Examination(hypotheses, np.array(roots), *hits)


def conversation_batch(ids: Sequence[int], prompt_length: int) -> Batch:
    """One conversation alone; everything behind its first ``prompt_length`` tokens is answer."""
    tokens_BS = torch.tensor([list(ids)])
    valid_BS, segment_BS = torch.ones_like(tokens_BS, dtype=torch.bool), torch.zeros_like(tokens_BS)
    position_BS = torch.arange(tokens_BS.shape[1])[None]
    answer_BS = position_BS >= prompt_length
    rows = compile_rows(valid_BS, segment_BS, position_BS, answer_BS)
    return Batch(tokens_BS, valid_BS, segment_BS, position_BS, answer_BS, rows)
