"""Pages to look at: the report of a comparison, and draft trees round by round."""

from eaglelab.report.report import write_report
from eaglelab.report.trees import Answers, load_answers
from eaglelab.report.viewer import write_trees

__all__ = ["Answers", "load_answers", "write_report", "write_trees"]
