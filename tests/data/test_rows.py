"""Rows against the documentation fixture, a naive loop, and poisoned addresses."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglelab.data.needed import needed_rows
from eaglelab.data.rows import Rows, compile_rows, first_seen
from tests.oracles.layout import packed

RULES = ("source", "advanced", "predicted")


def layout(lengths_by_sequence, S):
    """(valid, segment, position, answer) with every valid token in an answer."""
    valid, segment, position = packed(lengths_by_sequence, S)
    return valid, segment, position, valid.clone()


def naive_rows(valid, segment, answer, rule):
    """The definition, literally: (b, t, supervised, remaining) for every legal row."""
    B, S = valid.shape
    offset = RULES.index(rule)
    found = []
    for b in range(B):
        for t in range(S):

            def reaches(k, b=b, t=t):
                return t + k < S and all(valid[b, t + i] and segment[b, t + i] == segment[b, t] for i in range(k + 1))

            if valid[b, t] and reaches(1):
                remaining = max(k for k in range(S) if reaches(k))
                supervised = reaches(offset) and bool(answer[b, t + offset])
                found.append((b, t, supervised, remaining))
    return found


def compiled_rows(rows, S):
    return [
        (int(a) // S, int(a) % S, bool(s), int(m))
        for a, legal, s, m in zip(
            rows.source_BR.flatten(),
            rows.legal_BR.flatten(),
            rows.supervised_BR.flatten(),
            rows.remaining_BR.flatten(),
            strict=True,
        )
        if legal
    ]


def test_documentation_fixture():
    """tokens 11..16, the last invalid: four soft rows, three hard rows; the last soft target is f_4."""
    tokens = torch.tensor([[11, 12, 13, 14, 15, 16]])
    valid, segment, position, answer = layout([[5]], 6)
    rows = compile_rows(valid, segment, position, answer)
    feature = torch.arange(6.0)[None, :, None]
    feature[0, 5] = float("nan")

    assert rows.source_BR.tolist() == [[0, 1, 2, 3]]
    assert rows.num_supervised == 4
    assert rows.reaches(2).sum() == 3  # hard rows also need x_{t+2}
    assert rows.gather(tokens, 1).tolist() == [[12, 13, 14, 15]]
    assert rows.gather(feature, 1).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]  # q_5 comes from f_4


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("source", [2, 3]), ("advanced", [1, 2, 3]), ("predicted", [0, 1, 2])],
)
def test_supervision_rules_differ_by_one_row(rule, expected):
    """Prompt of two tokens, answer of three: the three rules shift the supervised rows by one each."""
    valid, segment, position, _ = layout([[5]], 5)
    answer = torch.tensor([[False, False, True, True, True]])
    rows = compile_rows(valid, segment, position, answer, supervise=rule)
    assert rows.source_BR[rows.supervised_BR].tolist() == expected


layouts = st.integers(1, 3).flatmap(
    lambda B: st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=4), min_size=B, max_size=B)
)


@settings(max_examples=150, deadline=None)
@given(layouts, st.sampled_from(RULES), st.randoms(use_true_random=False))
def test_equals_the_naive_loop(lengths, rule, random):
    S = max(sum(x) for x in lengths) + random.randint(0, 2) or 1
    valid, segment, position, _ = layout(lengths, S)
    answer = torch.tensor([[random.random() < 0.5 for _ in range(S)] for _ in lengths]) & valid
    rows = compile_rows(valid, segment, position, answer, supervise=rule)

    expected = naive_rows(valid, segment, answer, rule)
    assert compiled_rows(rows, S) == expected
    assert rows.num_supervised == sum(supervised for *_, supervised, _ in expected)
    flat = {(b, t): (supervised, remaining) for b, t, supervised, remaining in expected}
    for step in range(4):
        at_step = rows.supervised_at(step)
        for b in range(len(lengths)):
            for r in range(rows.legal_BR.shape[1]):
                t = int(rows.source_BR[b, r]) % S
                lands = bool(rows.legal_BR[b, r]) and flat[b, t][1] >= 1 + step and flat[b, t + step][0]
                assert bool(at_step[b, r]) == lands


@settings(max_examples=100, deadline=None)
@given(layouts, st.integers(0, 6))
def test_no_illegal_address_is_gathered(lengths, offset):
    """Poison every slot that no row may read; gathers stay finite."""
    S = max(sum(x) for x in lengths) + 2
    valid, segment, position, answer = layout(lengths, S)
    rows = compile_rows(valid, segment, position, answer)
    poisoned = torch.where(valid, segment.float(), torch.nan)
    for b, t in (~valid).nonzero().tolist():
        assert poisoned[b, t].isnan()
    seen = rows.gather(poisoned, offset)
    assert seen.isfinite().all()
    # whatever the offset, a row never reads another segment
    assert (seen[rows.legal_BR] == rows.segment_BR[rows.legal_BR]).all()


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_visibility_is_causal_and_segment_isolated(lengths):
    S = max(sum(x) for x in lengths) or 1
    rows = compile_rows(*layout(lengths, S))
    visible = rows.visible()
    B, R = rows.legal_BR.shape
    for b in range(B):
        for q in range(R):
            for k in range(R):
                allowed = q == k or (
                    bool(rows.legal_BR[b, q] & rows.legal_BR[b, k])
                    and k <= q
                    and rows.segment_BR[b, q] == rows.segment_BR[b, k]
                )
                assert bool(visible[b, q, k]) == allowed
    if R:
        assert first_seen(rows).equal(visible.int().argmax(-1))
    if rows.causal:  # then plain causal attention gives every real row the same context
        causal = torch.ones(R, R).tril().bool()
        assert (visible | ~rows.legal_BR[:, :, None] | ~causal).logical_and(causal).equal(causal.expand(B, R, R))


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors_of(part)]
    if isinstance(value, torch.Tensor):
        return [value]
    if not dataclasses.is_dataclass(value):
        return []
    return [tensor for field in dataclasses.fields(value) for tensor in tensors_of(getattr(value, field.name))]


@pytest.mark.parametrize("planned", [False, True])
def test_a_copy_on_another_device_has_everything_there(planned):
    rows = compile_rows(*layout([[5, 4], [6]], 10))
    if planned:
        rows.needed = needed_rows(rows, [rows.supervised_slots(step) for step in range(2)])
    moved = rows.to("meta")
    assert isinstance(moved, Rows) and moved.causal is rows.causal
    assert (moved.needed is not None) == planned
    before, after = tensors_of(rows), tensors_of(moved)
    assert len(before) == len(after) > (12 if planned else 6)
    assert all(tensor.device.type == "cpu" for tensor in before)
    assert all(tensor.device.type == "meta" for tensor in after)
    assert [tensor.shape for tensor in before] == [tensor.shape for tensor in after]


def test_step_and_offset_are_0_unless_asked_otherwise():
    rows = compile_rows(*layout([[6, 3]], 9))
    assert rows.supervised_slots().equal(rows.supervised_BR.flatten().nonzero().flatten())
    assert not rows.supervised_slots().equal(rows.supervised_slots(1))
    tokens_BS = torch.arange(9)[None]
    assert rows.gather(tokens_BS).equal(rows.source_BR)


def test_empty_plan():
    rows = compile_rows(*layout([[1], []], 3))
    assert rows.num_supervised == 0
    assert rows.legal_BR.shape == (2, 0)
    assert rows.gather(torch.full((2, 3, 4), torch.nan)).shape == (2, 0, 4)
    assert rows.visible().shape == (2, 0, 0)


def test_bad_rule_and_bad_shape():
    valid, segment, position, answer = layout([[4]], 4)
    with pytest.raises(ValueError, match="supervise='answer' is not one of source, advanced, predicted"):
        compile_rows(valid, segment, position, answer, supervise="answer")
    with pytest.raises(ValueError, match="must share one shape"):
        compile_rows(valid, segment[:, :3], position, answer)
