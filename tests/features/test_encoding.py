"""Stored numbers: what comes back, and how many bytes they take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglelab.features.encoding import ENCODINGS, encoding
from eaglelab.features.top_k import encode_top_k, teacher_rows, top_k_bytes_per_token, top_k_head

BYTES = {"float32": 4 * 40, "bfloat16": 2 * 40, "float8": 40 + 2, "int8": 40 + 2, "int4": 32 + 2 * 2}


IDENTITY = torch.nn.Identity()


def features(seed: int = 0, scale: float = 1.0, width: int = 40) -> torch.Tensor:
    """Rows of very different size, one of zeros and one with an outlier as residual streams have them."""
    x_Td = torch.randn(12, width, generator=torch.Generator().manual_seed(seed)) * scale
    x_Td[0] = 0
    x_Td[1, 3] = 100 * scale
    return x_Td * torch.logspace(-2, 2, 12)[:, None]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(ENCODINGS)), st.integers(0, 10_000), st.sampled_from([1e-3, 1.0, 50.0]))
def test_what_comes_back_is_within_the_stated_rounding(name, seed, scale):
    x_Td = features(seed, scale)
    kind = encoding(name)
    back_Td = kind.decode(kind.encode(x_Td), x_Td.shape[-1])
    assert back_Td.shape == x_Td.shape and back_Td.dtype == torch.float32
    assert ((back_Td - x_Td).abs() <= 1.001 * kind.slack(x_Td)).all()
    assert not back_Td[0].any()


@pytest.mark.parametrize(
    ("name", "worst"), [("float32", 0), ("bfloat16", 2**-8), ("int8", 1 / 250), ("float8", 1 / 27)]
)
def test_error_is_a_small_share_of_a_rows_largest_number(name, worst):
    x_Td = features()[2:]
    back_Td = encoding(name).decode(encoding(name).encode(x_Td), 40)
    share_T = (back_Td - x_Td).abs().amax(-1) / x_Td.abs().amax(-1)
    assert (share_T <= worst).all()


def test_an_outlier_costs_int4_its_own_group_only():
    x_Td = features()[1:2]
    error_d = (encoding("int4").decode(encoding("int4").encode(x_Td), 40) - x_Td).abs()[0]
    assert error_d[32:].max() < 0.1 * x_Td[0, 32:].abs().max()


@pytest.mark.parametrize("name", ENCODINGS)
def test_bytes_per_token(name):
    assert encoding(name).bytes_per_token(40) == BYTES[name]
    assert sum(part[0].nbytes for part in encoding(name).encode(features()).values()) == BYTES[name]


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_token_is_encoded_alone_and_zeros_decode_to_zeros(name):
    x_Td, kind = features(), encoding(name)
    whole, alone = kind.encode(x_Td), kind.encode(x_Td[5:6])
    assert all(torch.equal(whole[part][5:6].float(), alone[part].float()) for part in whole)
    padding = {part: torch.zeros_like(value[None].expand(2, *value.shape)) for part, value in whole.items()}
    assert torch.isfinite(kind.decode(padding, 40)).all()


def test_unknown_encodings_are_refused():
    with pytest.raises(ValueError, match="dtype='int2' is not one of float32, bfloat16, float8, int8, int4"):
        encoding("int2")


# ---- the most probable tokens ------------------------------------------------------------------------------------


def distribution(seed: int = 0, vocab: int = 50) -> torch.Tensor:
    return 3 * torch.randn(20, vocab, generator=torch.Generator().manual_seed(seed))


def test_stored_tokens_keep_their_probability_and_the_rest_its_mass():
    logits_TV = distribution()
    p_TV, q_TV = (
        logits_TV.softmax(-1),
        top_k_head(50)(teacher_rows(encode_top_k(logits_TV, IDENTITY, 8, chunk=7))).softmax(-1),
    )
    id_Tk = logits_TV.topk(8).indices
    torch.testing.assert_close(q_TV.gather(-1, id_Tk), p_TV.gather(-1, id_Tk), rtol=5e-3, atol=1e-5)
    rest_TV = q_TV.scatter(-1, id_Tk, 0)
    torch.testing.assert_close(rest_TV.sum(-1), p_TV.scatter(-1, id_Tk, 0).sum(-1), rtol=2e-2, atol=1e-4)
    spread = rest_TV.scatter(-1, id_Tk, torch.inf).amin(-1), rest_TV.amax(-1)
    torch.testing.assert_close(*spread)


def test_the_most_probable_token_stays_first_where_rounding_makes_two_equal():
    logits_TV = torch.full((1, 50), -9.0)
    logits_TV[0, 30], logits_TV[0, 7] = 5.00002, 5.0
    rows = teacher_rows(encode_top_k(logits_TV, IDENTITY, 4))
    assert rows[0, 4] > rows[0, 5] and top_k_head(50)(rows).argmax(-1).item() == 30


def test_a_certain_target_stays_certain():
    logits_TV = torch.zeros(1, 50)
    logits_TV[0, 11] = 200.0
    q_V = top_k_head(50)(teacher_rows(encode_top_k(logits_TV, IDENTITY, 4))).softmax(-1)[0]
    assert q_V[11] > 1 - 1e-6 and torch.isfinite(q_V.log()[11])


@pytest.mark.parametrize(("vocab", "size"), [(2048, 8 * 4 + 2), (128_256, 8 * 6 + 2)])
def test_top_k_bytes(vocab, size):
    assert top_k_bytes_per_token(vocab, 8) == size
    parts = encode_top_k(torch.zeros(1, vocab), IDENTITY, 8)
    assert sum(part.nbytes for part in parts.values()) == size
