"""The table that `eaglelab evaluate` prints: plain text, 80 columns."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

WIDTH = 80


def table(metrics: dict[str, Any], title: str = "") -> str:
    """Lay out the content of `metrics.json` for reading.

    Args:
        metrics: `EvaluationResult.to_dict()`, or the same read back from the file.
        title: heading; the target and the tree when empty.
    """
    settings = metrics["settings"]
    title = title or f"{settings['target']}, tree={settings['tree']['name']}"
    lines = [_clip(title), "-" * WIDTH]
    if metrics["partial"]:
        lines.append("PARTIAL: the run was interrupted; these are the answers measured so far")
    lines += [_row(label, value, note) for label, value, note in _summary(metrics)]
    if metrics["accepted_by_depth"]:
        lines += ["", "share of rounds in which at least k draft tokens were accepted"]
        lines += _by_depth(metrics["accepted_by_depth"])
    categories = _by_category(metrics["per_prompt"])
    if len(categories) > 1:
        lines += ["", f"{'category':<24}{'answers':>9}{'tau':>8}{'speed-up':>11}{'identical':>12}"]
        lines += categories
    return "\n".join(lines)


def _summary(metrics: dict[str, Any]) -> list[tuple[str, str, str]]:
    settings, seconds = metrics["settings"], metrics["seconds"]
    spread, split = metrics["speedup_spread"], metrics["time_split"]
    quartiles = (
        f"per answer: median {spread['median']:.2f}, quartiles {spread['quartile_1']:.2f} to {spread['quartile_3']:.2f}"
        if spread
        else ""
    )
    ends = metrics.get("tau_interval")
    interval = f"; 95 % interval {ends[0]:.2f} to {ends[1]:.2f}" if ends else ""
    temperature = settings["temperature"]
    rule = "greedy" if temperature == 0 else f"T {temperature:g}"
    amount = f"{metrics['new_tokens']} tokens in {metrics['rounds']} rounds, {rule}, batch {settings['batch']}"
    same = "answers equal to plain decoding, by ids"
    if not settings["same_text_expected"]:
        same = "equal to plain decoding; a sampled tree keeps the law, not the text"
    rows = [
        ("tau", _number(metrics["tau"]), f"accepted draft tokens + 1{interval}"),
        (
            "",
            _number(metrics["tau_ended"]),
            f"over the {metrics['answers_ended']} answers that the model ended itself",
        ),
        ("speed-up", _number(metrics["speedup"], "x"), quartiles),
        ("", _share(metrics["speedup"], metrics["tau"]), "of tau became speed (speed-up / tau)"),
        ("tokens/s", _number(metrics["tokens_per_s"], digits=1), "with drafter, prefill apart"),
        ("", _number(metrics["baseline_tokens_per_s"], digits=1), "same engine, no drafter"),
        ("identical", _fraction(metrics["identical"]), same),
    ]
    if "identical_to_generate" in metrics:
        fraction = _fraction(metrics["identical_to_generate"])
        rows.append(("", fraction, "answers equal to model.generate"))
    rows.append(("answers", str(metrics["answers"]), amount))
    without = f"{seconds['baseline_prefill']:.2f} s without drafter"
    rows.append(("prefill", f"{seconds['prefill']:.2f} s", without))
    if split:
        parts = ", ".join(f"{phase} {share:.0%}" for phase, share in split.items())
        rows.append(("time", f"{seconds['decode']:.2f} s", parts))
    rows.append(("numbers", settings["dtype"], f"{settings['device']}, {settings['threads']} threads"))
    if metrics["skipped"]:
        rows.append(("skipped", str(len(metrics["skipped"])), "prompts longer than the context"))
    return rows


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or whole is None else f"{part / whole:.0%}"


def _by_depth(shares: list[float]) -> list[str]:
    bars = enumerate(("#" * round(50 * share) for share in shares), start=1)
    return [f"  k = {k:<3}{share:>7.1%}  {bar}".rstrip() for (k, bar), share in zip(bars, shares, strict=True)]


def _by_category(turns: list[dict[str, Any]]) -> list[str]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for turn in turns:
        groups[turn["category"] or "-"].append(turn)
    lines = []
    for name, members in sorted(groups.items()):
        accepted = [count for turn in members for count in turn["accepted"]]
        tau = 1 + sum(accepted) / len(accepted) if accepted else None
        speedup = _group_speedup(members)
        same = f"{sum(turn['identical'] for turn in members)} of {len(members)}"
        lines.append(f"{_clip(name, 23):<24}{len(members):>9}{_number(tau):>8}{_number(speedup, 'x'):>11}{same:>12}")
    return lines


def _group_speedup(turns: list[dict[str, Any]]) -> float | None:
    rates = []
    for side in ("speculative", "baseline"):
        tokens = sum(turn[side]["round_tokens"] for turn in turns)
        rates.append(tokens / sum(turn[side]["decode_s"] for turn in turns) if tokens else None)
    with_drafter, without = rates
    return None if with_drafter is None or without is None else with_drafter / without


def _row(label: str, value: str, note: str) -> str:
    return _clip(f"{label:<11}{value:>13}   {note}".rstrip())


def _number(value: float | None, unit: str = "", *, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _fraction(count: dict[str, int]) -> str:
    return f"{count['count']} of {count['of']}"


def _clip(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
