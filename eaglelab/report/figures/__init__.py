"""The figures of a comparison, one question per file."""

from eaglelab.report.figures.acceptance import by_depth, by_task
from eaglelab.report.figures.calibration import reliability
from eaglelab.report.figures.speed import speed_against_tau, time_of_a_round
from eaglelab.report.figures.training import training_curves

__all__ = ["by_depth", "by_task", "reliability", "speed_against_tau", "time_of_a_round", "training_curves"]
