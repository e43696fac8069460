"""A diagnosis in words."""

from __future__ import annotations

from eaglelab.doctor.diagnosis import Diagnosis, Finding


def report(diagnosis: Diagnosis, *, shown: int = 6) -> str:
    """A table of the best hypotheses and the declared wiring, then what follows from it."""
    rows = list(diagnosis.findings[:shown])
    if diagnosis.declared not in rows:
        rows.append(diagnosis.declared)
    lines = [f"{'wiring':<22}{'tau':>6}{'one step':>10}{'tau gained, 95 %':>20}  trained with", "-" * 110]
    lines += [_line(one) for one in rows]
    if left := len(diagnosis.findings) - len(rows):
        lines.append(f"and {left} more hypotheses")
    return "\n".join([*lines, "", *_words(diagnosis)])


def _line(one: Finding) -> str:
    low, high = one.gain_interval
    gained = f"{low:+.2f} to {high:+.2f}" if one.hypothesis.name != "declared" else ""
    return f"{one.hypothesis.name:<22}{one.tau:>6.2f}{one.one_step:>10.1%}{gained:>20}  {one.hypothesis.trained}"


def _words(diagnosis: Diagnosis) -> list[str]:
    best, declared = diagnosis.best, diagnosis.declared
    if diagnosis.verdict == "as_declared":
        return [
            "diagnosis: the wiring is the declared one; no other reading of these weights drafts better",
            f"  ({diagnosis.sureness:.0%} of resamples over conversations agree). If tau is lower than hoped, look at",
            "  the training: budget, data that is not the target's own answers, draft vocabulary coverage.",
        ]
    if diagnosis.verdict == "no_wiring_fits":
        return [
            f"diagnosis: no wiring fits; the best of {len(diagnosis.findings)} gets {best.one_step:.0%} of steps.",
            "  These weights belong to another target or another revision of it, or have learned very little: compare",
            "  the target's fingerprint with that of the training, and look at the training's own accuracy.",
        ]
    sure = "certain" if diagnosis.verdict == "other_wiring" else "likely, more prompts would tell"
    better = f"better in {diagnosis.sureness:.0%} of resamples"
    lines = [
        f"diagnosis: the weights were trained with {best.hypothesis.trained}",
        f"  ({sure}: tau {best.tau:.2f} in place of {declared.tau:.2f}, {better})",
        f"what to change: {best.hypothesis.change}",
    ]
    if diagnosis.rivals:
        names = ", ".join(one.hypothesis.name for one in diagnosis.rivals)
        lines.append(f"not told apart from it: {names}")
    return lines
