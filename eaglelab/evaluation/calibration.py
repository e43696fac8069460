"""Is the drafter's confidence the share of nodes that the target accepts?

The confidence of a node is exp(log value of its path): the drafter's own estimate that the whole path down to the node
will be accepted. It is a proxy only, and how far off it is shifts with model, temperature, domain and precision
(article, section 0x06D).

Everything here is kept as sums per bin, so tables of parts add up to the table of the whole.

Letters: M nodes, K bins of equal width over [0, 1], the last one closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDING = 1e-5  # a path's probability in float32 may come out this far above 1


@dataclass(frozen=True)
class Calibration:
    """Sums over nodes, by confidence bin.

    count_K: int64, nodes.
    confidence_K, accepted_K: float64 and int64, sums of confidence and of acceptance.
    squared_K: float64, sum of (confidence - accepted) ** 2.
    """

    count_K: NDArray[np.int64]
    confidence_K: NDArray[np.float64]
    accepted_K: NDArray[np.int64]
    squared_K: NDArray[np.float64]

    @classmethod
    def empty(cls, bins: int = 10) -> Calibration:
        """No node yet.

        Raises:
            ValueError: bins < 1.
        """
        if bins < 1:
            raise ValueError(f"bins={bins}: a reliability table needs at least one bin")
        whole, real = np.zeros(bins, np.int64), np.zeros(bins)
        return cls(whole, real, whole, real)

    @classmethod
    def of(cls, confidence_M: ArrayLike, accepted_M: ArrayLike, *, bins: int = 10) -> Calibration:
        """Sums of these nodes.

        Args:
            confidence_M: probabilities.
            accepted_M: 0 or 1 (or bool).

        Raises:
            ValueError: lengths differ, a confidence outside [0, 1] or NaN, acceptance other than 0 and 1, or bins < 1.
        """
        confidence, accepted = _checked(confidence_M, accepted_M)
        zero = cls.empty(bins)
        bin_M = np.minimum((confidence * bins).astype(np.int64), bins - 1)
        return cls(
            zero.count_K + np.bincount(bin_M, minlength=bins),
            zero.confidence_K + np.bincount(bin_M, weights=confidence, minlength=bins),
            zero.accepted_K + np.bincount(bin_M[accepted], minlength=bins),
            zero.squared_K + np.bincount(bin_M, weights=(confidence - accepted) ** 2, minlength=bins),
        )

    def __add__(self, other: Calibration) -> Calibration:
        """The table of both parts.

        Raises:
            ValueError: other bins.
        """
        if self.bins != other.bins:
            raise ValueError(
                f"tables of {self.bins} and {other.bins} bins do not add up: build both with the same `bins`"
            )
        return Calibration(
            self.count_K + other.count_K,
            self.confidence_K + other.confidence_K,
            self.accepted_K + other.accepted_K,
            self.squared_K + other.squared_K,
        )

    @property
    def bins(self) -> int:
        return len(self.count_K)

    @property
    def nodes(self) -> int:
        return int(self.count_K.sum())

    @property
    def confidence(self) -> float | None:
        """Mean confidence; None without nodes."""
        return float(self.confidence_K.sum()) / self.nodes if self.nodes else None

    @property
    def acceptance(self) -> float | None:
        """Share of accepted nodes; None without nodes."""
        return int(self.accepted_K.sum()) / self.nodes if self.nodes else None

    @property
    def expected_error(self) -> float | None:
        """Expected calibration error: |observed acceptance - mean confidence| per bin, averaged over nodes.

        Biased upwards where bins hold few nodes. None without nodes. (Guo et al. 2017, eq. 3.)
        """
        gap_K = np.abs(self.accepted_K - self.confidence_K)
        return float(gap_K.sum()) / self.nodes if self.nodes else None

    @property
    def brier(self) -> float | None:
        """Mean of (confidence - accepted) ** 2, not binned; None without nodes."""
        return float(self.squared_K.sum()) / self.nodes if self.nodes else None

    def rows(self, *, level: float = 0.95) -> list[dict[str, Any]]:
        """The reliability table, one dict per bin; means of an empty bin are None.

        interval: Wilson interval of the observed acceptance. Nodes of one tree are not independent (of siblings one at
            most is accepted), so it is somewhat off where few trees fill a bin.
        """
        low_K, high_K = wilson(self.accepted_K, self.count_K, level=level)
        rows: list[dict[str, Any]] = []
        for k, count in enumerate(self.count_K.tolist()):
            rows.append(
                {
                    "bin": k,
                    "low": k / self.bins,
                    "high": (k + 1) / self.bins,
                    "nodes": count,
                    "confidence": float(self.confidence_K[k]) / count if count else None,
                    "acceptance": int(self.accepted_K[k]) / count if count else None,
                    "interval": [float(low_K[k]), float(high_K[k])] if count else None,
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Totals, then the reliability table, as plain numbers."""
        return {
            "nodes": self.nodes,
            "confidence": self.confidence,
            "acceptance": self.acceptance,
            "expected_error": self.expected_error,
            "brier": self.brier,
            "reliability": self.rows(),
        }


def merge(tables: Iterable[Calibration], *, bins: int = 10) -> Calibration:
    """The sum of any number of tables; the empty table of `bins` bins for none.

    Raises:
        ValueError: tables of different bins.
    """
    total = None
    for table in tables:
        total = table if total is None else total + table
    return Calibration.empty(bins) if total is None else total


def by_depth(
    confidence_M: ArrayLike, accepted_M: ArrayLike, depth_M: ArrayLike, *, bins: int = 10
) -> dict[int, Calibration]:
    """One table per level of the tree (1: the root's children), levels in order; their sum is `Calibration.of`.

    Raises:
        ValueError: as `Calibration.of`, or another number of depths.
    """
    confidence, accepted = _checked(confidence_M, accepted_M)
    depth = np.asarray(depth_M, dtype=np.int64).reshape(-1)
    if depth.shape != confidence.shape:
        raise ValueError(f"{len(confidence)} confidences but {len(depth)} depths: give one of each per node")
    return {
        int(level): Calibration.of(confidence[depth == level], accepted[depth == level], bins=bins)
        for level in np.unique(depth)
    }


def wilson(
    successes: ArrayLike, trials: ArrayLike, *, level: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Wilson score interval of a share: (low, high), both inside [0, 1]; (0, 1) without trials. (Wilson 1927.)"""
    count = np.asarray(trials, dtype=np.float64)
    share = np.divide(successes, count, out=np.zeros_like(count), where=count > 0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    n = np.maximum(count, 1)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = np.where(share == 0, 0.0, middle - half)  # the ends are exact there; rounding would miss them
    high = np.where(share == 1, 1.0, middle + half)
    return low, np.where(count > 0, high, 1.0)


def _checked(confidence_M: ArrayLike, accepted_M: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    confidence = np.asarray(confidence_M, dtype=np.float64).reshape(-1)
    accepted = np.asarray(accepted_M).reshape(-1)
    if confidence.shape != accepted.shape:
        raise ValueError(f"{len(confidence)} confidences but {len(accepted)} outcomes: give one of each per node")
    outside = ~((confidence >= 0) & (confidence <= 1 + _ROUNDING))
    if outside.any():
        raise ValueError(
            f"confidence {confidence[outside][0]} is no probability: pass exp(log value) of each node's path"
        )
    if not np.isin(accepted, (0, 1)).all():
        raise ValueError("accepted holds something other than 0 and 1: pass whether each node was accepted")
    return np.minimum(confidence, 1.0), accepted.astype(bool)
