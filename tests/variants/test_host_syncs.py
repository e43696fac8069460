"""A drafter's step makes the host wait for the device nowhere: neither forward, backward, optimizer nor what is logged.

The target's own pass is left out: on a CPU the library asks for packed positions. On a CPU nothing waits, but the
operations that would are the same ones. What only another device shows is in ``tests/devices``.
"""

from collections import Counter

import lightning as L
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eaglelab.variants import VARIANTS, OptimConfig
from tests.variants.conftest import loader, make_batch, tiny_target
from tests.variants.test_eagle import trainer

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten.unique_dim}
BY_MASK = {aten.index, aten.index_put, aten.index_put_}
"""These count the entries of a mask first, if they are given one."""
METHODS = ("tolist", "numpy", "__array__")


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func._overloadpacket
        masked = packet in BY_MASK and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        if packet in WAITING or masked:
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Watch(L.Callback):
    """From the moment when a batch is on the device until its optimizer step is done and logged."""

    def __init__(self):
        self.patch, self.waits = pytest.MonkeyPatch(), Waits()

    def on_train_batch_start(self, *_):
        self.waits.__enter__()
        for name in METHODS:
            self.patch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def on_train_batch_end(self, *_):
        self.patch.undo()
        self.waits.__exit__(None, None, None)

    def _counted(self, name, method):
        def call(tensor, *args, **kwargs):
            self.waits.found[name] += 1
            return method(tensor, *args, **kwargs)

        return call


@pytest.mark.parametrize("layout", [((30, 22), (41,)), ((30,), (24,))], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("eagle", {}),
        ("eagle", {"labels": "hard"}),
        ("hass", {}),
        ("eagle3", {}),
        ("eagle3", {"draft_vocab_size": 40, "feature_weight": 0.5, "checkpoint_steps": True}),
    ],
    ids=["eagle", "hard labels", "hass", "eagle3", "eagle3 draft vocabulary"],
)
def test_no_step_waits_for_the_device(variant, settings, layout, monkeypatch):
    target = tiny_target(num_hidden_layers=8)
    counts = torch.arange(target.vocab_size, 0, -1)
    optim = OptimConfig(lr=1e-3, clip_norm=0.5)
    module = VARIANTS[variant](target, optim, answer_counts=lambda: counts, **settings)
    watch, features = Watch(), target.features_of

    def unwatched(*args, **kwargs):
        before = Counter(watch.waits.found)
        streams = features(*args, **kwargs)
        watch.waits.found = before
        return streams

    monkeypatch.setattr(module.source.target, "features_of", unwatched)
    batches = [make_batch(layout, answer_from=12, seed=seed) for seed in range(3)]
    trainer(3, callbacks=[watch]).fit(module, loader(batches))
    assert module.micro_step == 3
    assert not watch.waits.found


def test_the_watch_sees_what_waits():
    """An ``item``, a mask as an index, a list and the truth of a tensor, once each."""
    watch, x = Watch(), torch.arange(3.0)
    watch.on_train_batch_start()
    x.sum().item(), x[x > 1], x.tolist(), bool(x[0])
    watch.on_train_batch_end()
    assert watch.waits.found.total() == 4
