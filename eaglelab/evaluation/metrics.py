"""Acceptance and speed from the records of a run. Times are in seconds.

Definitions (contracts, section 7):

* tau: (accepted draft tokens + 1) averaged over all rounds of all prompts. Accepted means accepted
  and published; a plain round (nothing drafted) counts with 0 accepted.
* tokens per second: tokens published by rounds / seconds of those rounds. The first token of an
  answer comes from the prefill; neither it nor the prefill's time is in here.
* speed-up: ratio of the two totals' rates, not a mean of ratios.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Timing:
    """One generation's tokens and seconds."""

    round_tokens: int
    decode_s: float
    prefill_s: float


@dataclass(frozen=True)
class TurnRecord:
    """One answer, decoded with the drafter and without.

    accepted: draft tokens accepted in each round.
    identical: the two answers are the same ids.
    identical_to_generate: the same against `model.generate`; None when not asked for.
    """

    id: str
    turn: int
    category: str
    prompt_tokens: int
    new_tokens: int
    stop_reason: str
    accepted: list[int]
    drafted: int
    verified: int
    draft_s: float
    pack_s: float
    verify_s: float
    commit_s: float
    speculative: Timing
    baseline: Timing
    identical: bool
    identical_to_generate: bool | None = None

    @property
    def speedup(self) -> float | None:
        """This answer's own ratio of rates; None when a side had no round."""
        return _ratio(_rate([self.speculative]), _rate([self.baseline]))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rounds": len(self.accepted), "speedup": self.speedup}


def summarize(turns: Sequence[TurnRecord]) -> dict[str, Any]:
    """The totals that `metrics.json` opens with. Values that no round defines are None.

    tau_ended: tau over the answers that the model ended itself. A model that repeats itself to the length limit is
        easy to draft for; where the two differ much, that is why.
    tau_interval: 95 % bootstrap interval over prompts.
    accepted_by_depth: element k - 1 is the share of rounds in which at least k draft tokens were
        accepted, so that tau = 1 + sum(accepted_by_depth); `accepted_by_depth_rounds` counts them.
    tokens_per_round: tokens published by rounds / rounds. Below tau by the rounds that ended on a
        draft token (end of the answer inside an accepted path), which had no frontier token.
    time_split: share of the decoding time; `other` is what lies between the rounds.
    speedup_spread: median and quartiles of the answers' own speed-ups.
    """
    accepted = [count for turn in turns for count in turn.accepted]
    ended = [turn for turn in turns if turn.stop_reason == "eos"]
    rounds = len(accepted)
    deepest = max(accepted, default=0)
    by_depth = [sum(count >= depth for count in accepted) for depth in range(1, deepest + 1)]
    speculative, baseline = [t.speculative for t in turns], [t.baseline for t in turns]
    rate, baseline_rate = _rate(speculative), _rate(baseline)
    summary = {
        "tau": _tau(turns),
        "tau_interval": tau_interval(turns),
        "tau_ended": _tau(ended),
        "answers_ended": len(ended),
        "tokens_per_s": rate,
        "baseline_tokens_per_s": baseline_rate,
        "speedup": _ratio(rate, baseline_rate),
        "speedup_spread": _spread([turn.speedup for turn in turns]),
        "rounds": rounds,
        "answers": len(turns),
        "new_tokens": sum(turn.new_tokens for turn in turns),
        "tokens_per_round": sum(t.round_tokens for t in speculative) / rounds if rounds else None,
        "drafted_nodes": sum(turn.drafted for turn in turns),
        "verified_rows": sum(turn.verified for turn in turns),
        "accepted_by_depth": [count / rounds for count in by_depth],
        "accepted_by_depth_rounds": by_depth,
        "identical": _count([turn.identical for turn in turns]),
        "seconds": {
            "decode": sum(t.decode_s for t in speculative),
            "prefill": sum(t.prefill_s for t in speculative),
            "baseline_decode": sum(t.decode_s for t in baseline),
            "baseline_prefill": sum(t.prefill_s for t in baseline),
        },
        "time_split": _time_split(turns),
    }
    checked = [t.identical_to_generate for t in turns if t.identical_to_generate is not None]
    if checked:
        summary["identical_to_generate"] = _count(checked)
    return summary


def _tau(turns: Sequence[TurnRecord]) -> float | None:
    accepted = [count for turn in turns for count in turn.accepted]
    return 1 + sum(accepted) / len(accepted) if accepted else None


def tau_interval(turns: Sequence[TurnRecord], *, level: float = 0.95, resamples: int = 10_000) -> list[float] | None:
    """Percentile bootstrap of tau over prompts: [low, high].

    Prompts are the unit, not rounds, because the rounds of one answer are alike; tau of a resample pools its rounds.
    None without rounds. The resampling is seeded, so equal records give equal intervals.
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for turn in turns:
        sums[turn.id][0] += sum(turn.accepted)
        sums[turn.id][1] += len(turn.accepted)
    accepted, rounds = np.array(list(sums.values()), dtype=np.int64).reshape(-1, 2).T
    if rounds.sum() == 0:
        return None
    drawn = np.random.default_rng(0).integers(len(rounds), size=(resamples, len(rounds)))
    pooled = 1 + accepted[drawn].sum(1) / np.maximum(rounds[drawn].sum(1), 1)
    tail = (1 - level) / 2
    return [float(x) for x in np.quantile(pooled, [tail, 1 - tail])]


def _rate(timings: Sequence[Timing]) -> float | None:
    seconds = sum(timing.decode_s for timing in timings)
    tokens = sum(timing.round_tokens for timing in timings)
    return tokens / seconds if tokens else None


def _ratio(value: float | None, reference: float | None) -> float | None:
    return None if value is None or reference is None else value / reference


def _count(flags: Sequence[bool]) -> dict[str, int]:
    return {"count": sum(flags), "of": len(flags)}


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, middle, high = quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
    return {"quartile_1": low, "median": middle, "quartile_3": high}


def _time_split(turns: Sequence[TurnRecord]) -> dict[str, float] | None:
    total = sum(turn.speculative.decode_s for turn in turns)
    if total <= 0:
        return None
    split = {
        phase: sum(getattr(turn, f"{phase}_s") for turn in turns) / total
        for phase in ("draft", "pack", "verify", "commit")
    }
    return {**split, "other": 1 - sum(split.values())}
