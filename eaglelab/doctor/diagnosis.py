"""From accuracies to a sentence: which wiring the weights were trained for, and how sure that is."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from eaglelab.doctor.examination import Examination
from eaglelab.doctor.hypotheses import Hypothesis

Verdict = Literal["as_declared", "other_wiring", "undecided", "no_wiring_fits"]

MARGIN = 0.05
"""Tokens of tau that another wiring must gain before it is worth a change."""
SURE = 0.99
"""Share of resamples that must agree."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One hypothesis, measured.

    Attributes:
        gain: tau above that of the declared wiring; ``gain_interval``: 95 %, paired over conversations.
    """

    hypothesis: Hypothesis
    tau: float
    one_step: float
    gain: float
    gain_interval: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The verdict and what it rests on.

    Attributes:
        findings: by falling tau.
        best: the wiring with the highest tau; for ``as_declared`` the declared one.
        sureness: share of resamples (over conversations) in which ``best`` beats the declared wiring; for
            ``as_declared``, in which no other one gains more than the margin.
        rivals: other wirings that do as well as ``best``.
    """

    verdict: Verdict
    best: Finding
    declared: Finding
    sureness: float
    rivals: tuple[Finding, ...]
    findings: tuple[Finding, ...]


def diagnose(examination: Examination, *, resamples: int = 2000) -> Diagnosis:
    """Weigh the hypotheses.

    The declared wiring is kept unless another one is longer by ``MARGIN`` in ``SURE`` of all resamples. A wiring whose
    one-step accuracy is below its floor is out; where all are, none fits: the weights belong to another target, or
    have learned little.
    """
    drawn_HN = _resampled_tau(examination, resamples)
    gain_HN = drawn_HN - drawn_HN[0]
    findings = [
        Finding(
            hypothesis,
            float(examination.tau_H[h]),
            float(examination.one_step_H[h]),
            float(examination.tau_H[h] - examination.tau_H[0]),
            tuple(float(x) for x in np.quantile(gain_HN[h], (0.025, 0.975))),  # type: ignore[arg-type]
        )
        for h, hypothesis in enumerate(examination.hypotheses)
    ]
    possible_H = np.array([one.one_step >= one.hypothesis.floor for one in findings])
    best = int(np.argmax(np.where(possible_H, examination.tau_H, 0))) if possible_H.any() else 0
    sureness = float((gain_HN[best] > 0).mean())
    verdict: Verdict
    if not possible_H.any():
        best, verdict, sureness = int(np.argmax(examination.one_step_H)), "no_wiring_fits", 1.0
    elif findings[best].gain < MARGIN:
        best, verdict = 0, "as_declared"
        sureness = float((gain_HN[possible_H].max(0) < MARGIN).mean())
    else:
        verdict = "other_wiring" if sureness >= SURE else "undecided"
    lead_H = np.quantile(drawn_HN[best] - drawn_HN, 0.025, axis=1)
    close = [lead <= 0 and findings[best].tau - one.tau < MARGIN for lead, one in zip(lead_H, findings, strict=True)]
    rivals = [one for h, one in enumerate(findings) if close[h] and h not in (0, best)]
    ordered = sorted(findings, key=lambda one: -one.tau)
    return Diagnosis(verdict, findings[best], findings[0], sureness, tuple(rivals) if best else (), tuple(ordered))


def _resampled_tau(examination: Examination, resamples: int) -> np.ndarray:
    """[H, resamples]; conversations are drawn together for all hypotheses, which pairs them."""
    roots_P = examination.roots_P
    hits_HP = examination.prefix_hits_HPK.sum(2)
    drawn_NP = np.random.default_rng(0).integers(len(roots_P), size=(resamples, len(roots_P)))
    return 1 + hits_HP[:, drawn_NP].sum(2) / roots_P[drawn_NP].sum(1)
