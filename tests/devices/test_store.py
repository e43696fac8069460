"""Feature stores on a device that is not the host: written from there, and read into a training there."""

import copy
import dataclasses

import pytest
import torch

from eaglelab.data.loader import RowLoader
from eaglelab.features.store import FeatureStore, StoreFeatures
from tests.devices import pretended
from tests.features.conftest import TAPS

FORMS = [{}, {"dtype": "bfloat16"}, {"dtype": "int8"}, {"dtype": "int4", "top_k": 5}]


@pytest.fixture
def there(deep_target, device):
    target = copy.deepcopy(deep_target)
    target.to(device)
    return target


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())) or "float32")
def test_decoded_features_are_those_of_the_host_and_nobody_waits(form, store, there, deep_target, device):
    opened = store(**form)
    batch = next(iter(RowLoader(opened.rows("train"), batch_size=2)))
    expected = StoreFeatures(opened, deep_target).of(batch, TAPS)
    source = StoreFeatures(opened, there)
    source.of(batch.to(device), TAPS)
    with pretended.counting() as waits:
        moved = dataclasses.replace(batch, sequences=source.plan(batch)).to(device, non_blocking=True)
        found = source.of(moved, TAPS)
        logits = found.teacher_head(found.teacher_BSw)
    assert waits == []
    for tap, stream in expected.streams.items():
        torch.testing.assert_close(found.streams[tap].cpu(), stream)
    torch.testing.assert_close(logits.cpu(), expected.teacher_head(expected.teacher_BSw), rtol=1e-4, atol=1e-5)


def test_a_store_is_written_from_a_device(writer, there, tmp_path):
    """The same rows, features as close as another device's arithmetic leaves them."""
    for name, target in (("host", None), ("device", there)):
        assert writer(tmp_path / name, target=target).write(show_progress=False).complete
    host, device = (FeatureStore(tmp_path / name) for name in ("host", "device"))
    for one, other in zip(host.rows("train"), device.rows("train"), strict=True):
        assert (one.tokens_S == other.tokens_S).all()
        for name, feature in one.features.items():
            stored = torch.as_tensor(other.features[name])
            torch.testing.assert_close(stored, torch.as_tensor(feature), rtol=1e-3, atol=1e-4)
