"""The contest of attention kernels: who takes part, that all compute the same, and what is reported."""

import json

import pytest
import torch

from eaglelab.training import attention_speed
from eaglelab.training.attention_speed import AttentionContest, attention_contest, attention_table
from tests.drafters.test_flex import uncompiled

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("segments", "steps", "with_flex", "names"),
    [
        (1, 0, False, {"blocks", "masked", "causal"}),
        (3, 0, True, {"blocks", "flex", "masked"}),
        (3, 2, True, {"blocks", "flex"}),
        (1, 1, False, {"blocks"}),
    ],
)
def test_who_takes_part(segments, steps, with_flex, names, monkeypatch):
    monkeypatch.setattr(attention_speed, "flex_usable", lambda *_: with_flex)
    with uncompiled():
        contest = attention_contest(20, 4, 8, 2, segments, steps, CPU, torch.float32, 3, groups=2)
    assert set(contest.seconds) == names
    assert all(len(seconds) == 3 for seconds in contest.seconds.values())
    assert set(contest.speedup()) == names
    assert contest.speedup()["blocks"].values == (1, 1, 1)
    told = json.loads(json.dumps(contest.to_dict()))
    assert told["setting"]["segments"] == segments
    assert told["contestants"]["blocks"]["peak_bytes"] is None
    assert (told["refusal"] is None) == with_flex


@pytest.mark.parametrize(("segments", "steps"), [(1, 0), (3, 0), (3, 2)])
def test_all_compute_the_same(segments, steps, monkeypatch):
    monkeypatch.setattr(attention_speed, "flex_usable", lambda *_: True)
    drawn = [torch.randn(2, heads, 20, 8, dtype=torch.float64) for heads in (4, *[2] * (2 + 2 * steps))]
    row_R = torch.arange(20)
    with uncompiled():
        contestants = attention_speed._contestants(
            drawn, (row_R // 7 * 7 * (segments > 1))[None], row_R, steps, segments
        )
        outs = [attend(*drawn) for attend in contestants.values()]
    assert len(outs) >= 2
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


def test_only_pairs_that_see_each_other_are_counted():
    """Two segments of 3 and 2 rows: 6 and 3 pairs, in each of two sequences and four heads of 8."""
    contest = attention_contest(5, 4, 8, 2, 2, 0, CPU, torch.float32, 1, groups=2)
    assert contest.flops == 14 * 2 * (6 + 3) * 4 * 8
    share = contest.flops / contest.seconds["blocks"][0] / contest.matmul_flops
    assert contest.of_matmul("blocks") == pytest.approx(share)
    table = attention_table([contest])
    assert "2 x 4 heads of 8 over 2 of keys" in table and "float32, 5 rows, 2 segments, 0 own keys" in table
    assert table.endswith("FlexAttention is not usable here: it is not written for cpu and torch.float32")


def test_a_speedup_is_the_ratio_within_a_repetition():
    contest = AttentionContest({}, {"blocks": [4.0, 9.0, 2.0], "flex": [2.0, 3.0, 2.0]})
    assert contest.speedup()["flex"].values == (2.0, 3.0, 1.0)
    assert contest.speedup()["flex"].median == 2.0


@pytest.mark.parametrize(("sizes", "says"), [({"segments": 9}, "segments=9"), ({"groups": 3}, "multiple of groups=3")])
def test_sizes_that_do_not_go_together_are_refused(sizes, says):
    given = {"rows": 8, "heads": 4, "head_dim": 8, "batch": 1, "segments": 2, "steps": 0} | sizes
    with pytest.raises(ValueError, match=says):
        attention_contest(**given, device=CPU, dtype=torch.float32, repetitions=1)
