import pytest

from tests.devices import pretended


@pytest.fixture
def device():
    """The pretended device, for one test; the process's own tensors are not touched by it."""
    found = pretended.start()
    with pretended.Constructors():
        yield found
