"""A teacher's distribution as its k most probable tokens, their log-probabilities and the mass of all others.

Teacher rows of this kind are [..., 2k + 1] in fp32: k token ids (exact below 2^24), k log-probabilities, descending,
and the logarithm of the mass outside. They gather like features do.

Letters: T tokens, t tokens of a chunk, d hidden width, k most probable tokens, V vocabulary, w = 2k + 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eaglelab.features.encoding import Parts
from eaglelab.features.source import Head

NOTHING = -60.0
"""Logarithm of a mass that is nothing in fp32."""
TIE = 1e-6
"""Set between neighbours of equal rounded log-probability, so that the most probable token stays the first one."""


def encode_top_k(final_Td: Tensor, head: Head, k: int, chunk: int = 512) -> dict[str, Tensor]:
    """Last features -> ``ids`` (16 bits where the vocabulary allows), ``logp`` and ``outside`` (fp16), [T, k], [T, 1].

    Logits are kept for ``chunk`` tokens at a time.
    """
    pieces = [_most_probable(head(final_td), k) for final_td in final_Td.split(chunk)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _most_probable(logits_tV: Tensor, k: int) -> dict[str, Tensor]:
    kind = torch.uint16 if logits_tV.shape[-1] <= 2**16 else torch.int32
    logits_tV = logits_tV.float()
    best_tk, id_tk = logits_tV.topk(k, dim=-1)
    logp_tk = best_tk - logits_tV.logsumexp(-1, keepdim=True)
    outside_t1 = (1 - logp_tk.double().exp().sum(-1, keepdim=True)).clamp(min=0).log().clamp(min=NOTHING)
    return {"ids": id_tk.to(kind), "logp": logp_tk.clamp(min=NOTHING).half(), "outside": outside_t1.half()}


def top_k_bytes_per_token(vocab_size: int, k: int) -> int:
    """Stored size of one token's distribution."""
    return k * ((2 if vocab_size <= 2**16 else 4) + 2) + 2


def teacher_rows(parts: Parts) -> Tensor:
    """Stored tensors -> teacher rows [..., 2k + 1]."""
    k = parts["ids"].shape[-1]
    order = TIE * torch.arange(k, device=parts["ids"].device)
    return torch.cat((parts["ids"].float(), parts["logp"].float() - order, parts["outside"].float()), dim=-1)


def top_k_head(vocab_size: int) -> Head:
    """Reads teacher rows: [..., 2k + 1] -> logits [..., V], fp32.

    The mass outside is spread evenly over the tokens that are not stored: the distribution of highest entropy that
    agrees with what is.
    """

    def head(rows: Tensor) -> Tensor:
        k = rows.shape[-1] // 2
        id_k, logp_k, outside_1 = rows[..., :k].long(), rows[..., k : 2 * k], rows[..., 2 * k :]
        rest_1 = outside_1 - math.log(max(vocab_size - k, 1))
        rest_1 = torch.minimum(rest_1, logp_k[..., -1:] - TIE)
        return rest_1.expand(*rows.shape[:-1], vocab_size).scatter(-1, id_k, logp_k)

    return head
