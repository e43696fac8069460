"""Compare a store with what the target says now.

Letters: S tokens of a row, d width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from eaglelab.data import PackedRow
from eaglelab.features.contents import Contents
from eaglelab.features.encoding import encoding
from eaglelab.features.plan import SPLITS
from eaglelab.features.store import FeatureStore
from eaglelab.features.top_k import teacher_rows
from eaglelab.features.writer import encoded_rows
from eaglelab.target import FINAL, FrozenTarget

NOISE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far two computations of one feature may lie apart, in units of the row's largest number: batches, devices and
kernels differ. A feature of another token or layer is off by about 1."""
LOGP_NOISE = {torch.float32: 2e-2, torch.float16: 5e-2, torch.bfloat16: 3e-1}
"""The same for log-probabilities, their rounding to fp16 included."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """What was compared.

    Attributes:
        rows, tokens: recomputed.
        worst: largest difference found, as a share of what is allowed.
    """

    rows: int
    tokens: int
    worst: float


def verify(
    store: FeatureStore, target: FrozenTarget, *, rows: int = 16, seed: int = 0, show_progress: bool | None = None
) -> Verification:
    """Check the digest of every file, then recompute a random sample of rows.

    Args:
        rows: sample size, over all splits; more than there are: all.
        seed: of the sample.

    Raises:
        ManifestMismatch: the store is of another target.
        ValueError: a damaged file, or a row that differs: names split, row and stored tensor.
    """
    store.require(target, store.manifest.taps)
    store.check_all()
    splits = {name: found for name in SPLITS if (found := store.rows(name)) is not None}
    places = [(name, index) for name, some in splits.items() for index in range(len(some))]
    chosen = np.random.default_rng(seed).permutation(len(places))[:rows]
    worst, tokens = 0.0, 0
    for i in tqdm(sorted(chosen.tolist()), desc="verify", unit="row", disable=show_progress is False or None):
        name, index = places[i]
        row = splits[name][index]
        differences = compare(row, target, store.plan.contents)
        tensor, share = max(differences.items(), key=lambda item: item[1])
        if not share <= 1:
            raise ValueError(
                f"{store.path}: row {index} of {name} differs from the target in {tensor}, {share:.3g} times as much "
                "as rounding explains; cache again into another folder"
            )
        worst, tokens = max(worst, share), tokens + len(row.tokens_S)
    return Verification(len(chosen), tokens, worst)


def compare(row: PackedRow, target: FrozenTarget, contents: Contents) -> dict[str, float]:
    """The largest difference of each stored stream from a computation of now, as a share of what is allowed."""
    exact = dataclasses.replace(contents, streams=(*contents.streams, FINAL), dtype="float32", top_k=None)
    exact = dataclasses.replace(exact, streams=tuple(dict.fromkeys(exact.streams)))
    now = next(encoded_rows(target, [row], exact))
    shares = {}
    kind = encoding(contents.dtype)
    for tap in contents.streams:
        stored_Sd = kind.decode(contents.parts_of(str(tap), row.features), contents.width)
        now_Sd = now[str(tap)]
        largest_S1 = now_Sd.abs().amax(-1, keepdim=True)
        allowed_Sd = 1.02 * kind.slack(now_Sd) + NOISE[target.dtype] * largest_S1 + 1e-6
        shares[str(tap)] = float(((stored_Sd - now_Sd).abs() / allowed_Sd).nan_to_num(torch.inf).max())
    if contents.top_k:
        logits_SV = target.lm_head(now[str(FINAL)].to(target.device, target.dtype)).float().cpu()
        shares["teacher"] = _compare_top_k(contents.parts_of("teacher", row.features), logits_SV, target.dtype)
    return shares


def _compare_top_k(parts: Mapping[str, Tensor], logits_SV: Tensor, dtype: torch.dtype) -> float:
    """Log-probabilities of the stored tokens, those that carry no probability left out."""
    rows = teacher_rows(parts)
    k = rows.shape[-1] // 2
    now_Sk = logits_SV.log_softmax(-1).gather(-1, rows[:, :k].long())
    stored_Sk = rows[:, k : 2 * k]
    matters_Sk = (now_Sk > -12) | (stored_Sk > -12)
    off_Sk = (stored_Sk - now_Sk).abs() * matters_Sk
    return float((off_Sk / LOGP_NOISE[dtype]).nan_to_num(torch.inf).max())
