"""A graceful stop that nobody has to ask for."""

from eaglelab.training.callbacks import GracefulStop


class StopAfter(GracefulStop):
    """Ends a training after so many optimizer steps, as Ctrl-C would."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.stopped = trainer.global_step >= self.steps
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
