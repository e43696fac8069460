"""Training runs: the job, its callbacks and the folder that it leaves."""

from eaglelab.training.job import TrainingResult
from eaglelab.training.run_folder import RunFolder, read_checkpoint
from eaglelab.training.stages import train
from eaglelab.training.strategies import ShardedStrategy
from eaglelab.training.zero import ZeroStrategy

__all__ = ["RunFolder", "ShardedStrategy", "TrainingResult", "ZeroStrategy", "read_checkpoint", "train"]
