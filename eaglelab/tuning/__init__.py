from eaglelab.tuning.recording import Growth, Recording, record
from eaglelab.tuning.replay import Replay
