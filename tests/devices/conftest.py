import pytest

from tests.devices import pretended
from tests.features.conftest import deep_target, store, writer  # noqa: F401


@pytest.fixture
def device():
    """The pretended device, for one test; the process's own tensors are not touched by it."""
    found = pretended.start()
    with pretended.Constructors():
        yield found
