"""What wiring were these weights trained for? Measured, not guessed."""

from eaglelab.doctor.diagnosis import Diagnosis, Finding, diagnose
from eaglelab.doctor.examination import Examination, examine
from eaglelab.doctor.hypotheses import Hypothesis, hypotheses_for
from eaglelab.doctor.report import report
from eaglelab.doctor.wiring import Wiring

__all__ = [
    "Diagnosis",
    "Examination",
    "Finding",
    "Hypothesis",
    "Wiring",
    "diagnose",
    "examine",
    "hypotheses_for",
    "report",
]
