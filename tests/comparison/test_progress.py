"""The estimate of what is left."""

import pytest

from eaglelab.comparison import progress as module
from eaglelab.comparison.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes when it is told to."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def go(seconds):
        now[0] += seconds

    return go


def test_jobs_are_expected_to_take_what_others_of_their_kind_took(clock):
    with Progress(["train", "train", "chain", "chain", "static"], {"train": 100.0}) as bar:
        assert bar.seconds_left() is None  # nothing is known about cells
        with bar.job("train", "first"):
            clock(80)
        assert bar.seconds_left() == 80 + 3 * 80  # the measured time replaces the expected one, and stands for all
        bar.skip("train")
        with bar.job("chain", "second"):
            clock(10)
        assert bar.seconds_left() == 10 + 45  # a static cell: the mean of all that was seen
        with bar.job("chain", "third"):
            clock(20)
        with bar.job("static", "fourth"):
            assert bar.seconds_left() == pytest.approx((80 + 10 + 20) / 3)
            clock(30)
        assert bar.seconds_left() == 0


def test_a_job_that_fails_is_not_counted(clock):
    with Progress(["chain"], {"chain": 5.0}) as bar:
        with pytest.raises(KeyboardInterrupt), bar.job("chain", "first"):
            raise KeyboardInterrupt
        assert bar.seconds_left() == 5
