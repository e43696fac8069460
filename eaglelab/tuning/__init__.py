"""Which draft tree is fastest here: costs of this machine, trees replayed on recorded drafts, a measurement to check.

`record` decodes plainly and drafts at every place of the text; `Replay` says, exactly, what any smaller dynamic tree
would have had accepted on that text; `measure_costs` times verification by rows and drafting by width; `choose` puts
them together; `tune` runs all of it and measures the choice.
"""

from eaglelab.tuning.choice import Grid, Prediction, Shape, choose, predict
from eaglelab.tuning.costs import Costs, measure_costs
from eaglelab.tuning.recording import Growth, Recording, record
from eaglelab.tuning.replay import Replay
from eaglelab.tuning.tune import Tuning, tune, tuning_table

__all__ = [
    "Costs",
    "Grid",
    "Growth",
    "Prediction",
    "Recording",
    "Replay",
    "Shape",
    "Tuning",
    "choose",
    "measure_costs",
    "predict",
    "record",
    "tune",
    "tuning_table",
]
