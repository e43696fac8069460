"""What a training will need, told before anything is loaded: parameters, memory, work, disk, and what would not fit."""

from eaglelab.planning.plan import Plan, make_plan
from eaglelab.planning.table import plan_table

__all__ = ["Plan", "make_plan", "plan_table"]
