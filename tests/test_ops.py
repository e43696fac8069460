"""The helpers of hot loops do what the plain operations do."""

from unittest.mock import patch

import pytest
import torch

from eaglelab import ops


@pytest.mark.parametrize("shape", [(3, 2, 1024), (1, 5, 128), (7, 300), (0, 256), (2, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_largest_score_and_the_first_place_of_equals(shape, dtype):
    """Rounded to few values, so that most rows have their largest score at many places, in several blocks."""
    torch.manual_seed(0)
    scores = torch.randint(-3, 3, shape).to(dtype)
    with patch.object(ops, "FEW", 0):
        best, place = ops.largest(scores)
    assert best.equal(scores.amax(-1))
    first = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
    assert place.equal(first)


def test_distinct_scores_and_a_nan_in_any_block():
    torch.manual_seed(0)
    scores = torch.randn(6, 512)
    with patch.object(ops, "FEW", 0):
        assert ops.largest(scores)[1].equal(scores.argmax(-1))
        scores[1, 3] = scores[2, 511] = scores[3, 200] = torch.nan
        best, _ = ops.largest(scores)
    assert best.isnan().tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("before", [True, False])
def test_no_gradient_inside_and_the_state_of_before_behind(before):
    weight = torch.ones(2, requires_grad=True)

    @ops.no_grad
    def double(x, *, fail=False):
        assert not torch.is_grad_enabled()
        if fail:
            raise KeyError
        return 2 * x

    with torch.set_grad_enabled(before):
        assert not double(weight).requires_grad
        with pytest.raises(KeyError):
            double(weight, fail=True)
        assert torch.is_grad_enabled() is before
    assert double.__name__ == "double"
