"""The maps of a draft vocabulary, for any counts: against plain Python."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaglelab.data.draft_vocabulary import DraftVocabulary

counts = st.lists(st.integers(0, 6), min_size=1, max_size=40)


@st.composite
def counted(draw, most=40):
    """Counts by target id, and a size."""
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=most))
    return counts, draw(st.integers(1, len(counts)))


@given(counted())
def test_the_most_frequent_ids_ties_to_the_lower(case):
    counts, size = case
    expected = sorted(sorted(range(len(counts)), key=lambda token: (-counts[token], token))[:size])
    vocabulary = DraftVocabulary.most_frequent(torch.tensor(counts), size)
    assert vocabulary.ids_K.tolist() == expected
    assert vocabulary.ids_K.dtype == torch.int64


@given(counted())
def test_the_two_maps_say_the_same(case):
    """nonzero(t2d) == arange + d2t; offsets start at the first id and never fall, since ids are distinct and sorted."""
    counts, size = case
    vocabulary = DraftVocabulary.most_frequent(torch.tensor(counts), size)
    d2t, t2d = vocabulary.d2t.tolist(), vocabulary.t2d.tolist()
    target_ids = [draft + offset for draft, offset in enumerate(d2t)]
    assert target_ids == [token for token, there in enumerate(t2d) if there]
    assert (len(d2t), len(t2d)) == (size, len(counts))
    assert d2t == sorted(d2t) and d2t[0] >= 0
    draft_of = {token: draft for draft, token in enumerate(target_ids)}
    assert all(draft_of.get(token) == (sum(t2d[:token]) if t2d[token] else None) for token in range(len(counts)))


@given(counted(most=9))
def test_no_other_vocabulary_of_the_size_covers_more(case):
    counts, size = case
    covered = DraftVocabulary.most_frequent(torch.tensor(counts), size).coverage(torch.tensor(counts))
    best = max(sum(counts[token] for token in chosen) for chosen in itertools.combinations(range(len(counts)), size))
    assert covered == pytest.approx(best / max(sum(counts), 1))


@given(counted(), st.data())
def test_another_map_has_another_digest(case, data):
    """Also where the offsets alone would not tell: the same ids of a larger target."""
    counts, size = case
    one = DraftVocabulary.most_frequent(torch.tensor(counts), size)
    ids = sorted(data.draw(st.sets(st.integers(0, len(counts) - 1), min_size=size, max_size=size)))
    other = DraftVocabulary(torch.tensor(ids), len(counts))
    assert (one.digest == other.digest) == (one.ids_K.tolist() == ids)
    assert DraftVocabulary(one.ids_K, len(counts) + 1).digest != one.digest


@given(st.lists(st.integers(-2, 8), max_size=6))
def test_only_ascending_ids_inside_the_vocabulary_are_taken(ids):
    fine = bool(ids) and ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < 7
    if fine:
        assert DraftVocabulary(torch.tensor(ids), 7).ids_K.tolist() == ids
    else:
        with pytest.raises(ValueError, match="ascend strictly"):
            DraftVocabulary(torch.tensor(ids, dtype=torch.int64), 7)


@given(counts, st.sampled_from([-1, 0, 1]))
def test_a_size_outside_the_vocabulary_is_refused(counts, beyond):
    size = 0 if beyond == 0 else (-1 if beyond < 0 else len(counts) + 1)
    with pytest.raises(ValueError, match="must be between 1 and"):
        DraftVocabulary.most_frequent(torch.tensor(counts), size)
