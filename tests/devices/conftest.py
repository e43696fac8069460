"""Tests on the pretended device have a process of their own (``tests/test_devices.py``).

PyTorch asks for its devices once, at the first backward of a process, so the device has to be there before. While it is
there it is the accelerator of the process.
"""

import os

import pytest

from tests.features.conftest import deep_target, store, writer  # noqa: F401

ALONE = "EAGLELAB_PRETENDED_DEVICE"
if ALONE in os.environ:
    from tests.devices import pretended

    pretended.start()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device():
    """The pretended device."""
    with pretended.Constructors():
        yield pretended.start()
