"""Comparing drafters: matched budgets, one grid of evaluations, paired statistics."""

from eaglelab.comparison.compare import compare
from eaglelab.comparison.diff import Difference, diff_table, differences
from eaglelab.comparison.plan import Budget, Plan, recipes_for
from eaglelab.comparison.table import comparison_table
from eaglelab.comparison.trainings import Interrupted

__all__ = [
    "Budget",
    "Difference",
    "Interrupted",
    "Plan",
    "compare",
    "comparison_table",
    "diff_table",
    "differences",
    "recipes_for",
]
