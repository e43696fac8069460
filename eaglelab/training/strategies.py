"""How the work is spread over processes, beyond what Lightning's own strategies do."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy


class ShardedTargetStrategy(DDPStrategy):
    """The drafter as with ``ddp``, the frozen target's layers sharded over all processes.

    A drafter is one decoder layer: for a 70B target about 1.3 B parameters, 21 GB with gradients and AdamW's state. The
    target is what does not fit, and it needs neither gradients nor optimizer state, so its layers alone are sharded
    (:meth:`~eaglelab.target.FrozenTarget.shard`), and each is gathered while it runs.
    """

    shards_target = True
