"""Training runs: the job, its callbacks and the folder that it leaves."""

from eaglelab.training.job import TrainingResult, train
from eaglelab.training.run_folder import RunFolder, read_checkpoint

__all__ = ["RunFolder", "TrainingResult", "read_checkpoint", "train"]
