"""A stop that loses nothing."""

import signal

import lightning as L
import pytest
import torch

from eaglelab.training.callbacks import GracefulStop, LastCheckpoint
from tests.variants.conftest import eagle, loader, make_batch
from tests.variants.test_eagle import trainer


class InterruptAt(L.Callback):
    """Ctrl-C during the given micro-batch."""

    def __init__(self, micro_step):
        self.micro_step = micro_step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if module.micro_step + 1 == self.micro_step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("micro_step", [3, 4])
def test_a_stop_waits_for_the_optimizer_step_to_be_whole(micro_step, target, tmp_path):
    """Accumulate 2, interrupted in either half of the second step: both micro-batches are in, and it is saved."""
    stop = GracefulStop()
    callbacks = [InterruptAt(micro_step), stop, LastCheckpoint(str(tmp_path), every_n_steps=0)]
    module = eagle(target, optim={"accumulate": 2})
    fit = trainer(5, callbacks=callbacks)
    before = signal.getsignal(signal.SIGINT)
    fit.fit(module, loader([make_batch(seed=i) for i in range(10)]))
    assert stop.stopped
    assert (fit.global_step, module.micro_step) == (2, 4)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    for name, weight in module.network.state_dict().items():
        assert saved["state_dict"][f"network.{name}"].equal(weight)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_at_once(target):
    stop = GracefulStop()
    stop._request(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        stop._request(signal.SIGINT, None)
