"""Features are the model's own, whoever else is in the row, and never depend on what else is asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglelab.target import FrozenTarget, default_taps, validate_taps
from tests.target.target_families import FAMILIES, VOCAB, build, target_of

families = pytest.mark.parametrize("family", FAMILIES)
TAPS = (0, 2, "final")


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@families
def test_features_embedding_and_head_are_the_models_own(family: str) -> None:
    target = target_of(family)
    ids_BS = tokens(2, 15)
    with torch.no_grad():
        own = target.model(ids_BS, output_hidden_states=True)
    features = target.features(ids_BS, TAPS)
    for tap in (0, 2):
        assert gap(features[tap], own.hidden_states[tap]) < 1e-6
    assert gap(features["final"], own.hidden_states[-1]) < 1e-6
    assert gap(target.lm_head(features["final"]), own.logits) < 1e-6
    if family == "gpt2":  # position vectors are not part of the token embedding
        same_token_BS = torch.full((1, 4), 9)
        entering_Sd = target.features(same_token_BS, (0,))[0][0]
        positions_Sd = target.model.transformer.wpe.weight[:4]
        assert gap(entering_Sd - positions_Sd, target.embed(same_token_BS)[0]) < 1e-6
    else:
        assert gap(target.embed(ids_BS), features[0]) < 1e-6


@families
def test_each_packed_segment_equals_the_sample_alone(family: str) -> None:
    target = target_of(family)
    lengths = [[9, 4, 7], [12, 8]]
    B, S = len(lengths), 22
    ids_BS, segment_BS = tokens(B, S, seed=1), torch.full((B, S), -1)
    for b, row in enumerate(lengths):
        segment_BS[b, : sum(row)] = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
    packed = target.features(ids_BS, TAPS, segment_BS=segment_BS)
    for b, row in enumerate(lengths):
        start = 0
        for length in row:
            alone = target.features(ids_BS[b : b + 1, start : start + length], TAPS)
            for tap in TAPS:
                assert gap(packed[tap][b, start : start + length], alone[tap][0]) < 1e-5
            start += length
    assert all(bool(torch.isfinite(value).all()) for value in packed.values())


@families
def test_padding_never_reaches_a_valid_token(family: str) -> None:
    target = target_of(family)
    ids_BS = tokens(3, 16, seed=2)
    valid_BS = torch.arange(16) < torch.tensor([[16], [9], [0]])
    clean = target.features(ids_BS, TAPS, valid_BS=valid_BS)
    dirty = target.features(ids_BS.masked_fill(~valid_BS, -100), TAPS, valid_BS=valid_BS)
    alone = target.features(ids_BS[1:2, :9], TAPS)
    for tap in TAPS:
        assert bool(torch.isfinite(dirty[tap]).all())
        assert torch.equal(clean[tap][valid_BS], dirty[tap][valid_BS])
        assert gap(dirty[tap][1, :9], alone[tap][0]) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_left_padding_is_handled_by_the_mask(family: str) -> None:
    target = target_of(family)
    ids_BS = tokens(1, 12, seed=3)
    valid_BS = torch.arange(12)[None] >= 4
    position_BS = (torch.arange(12)[None] - 4).clamp(min=0)
    padded = target.features(ids_BS, ("final",), valid_BS=valid_BS, position_BS=position_BS)["final"]
    assert gap(padded[:, 4:], target.features(ids_BS[:, 4:], ("final",))["final"]) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
def test_eager_attention_agrees(family: str) -> None:
    eager = FrozenTarget(build(family, attn_implementation="eager"))
    assert eager.text_config._attn_implementation == "eager"
    ids_BS, segment_BS = tokens(2, 14, seed=4), (torch.arange(14) // 8).expand(2, 14)
    a = eager.features(ids_BS, TAPS, segment_BS=segment_BS)
    b = target_of(family).features(ids_BS, TAPS, segment_BS=segment_BS)
    assert all(gap(a[tap], b[tap]) < 1e-5 for tap in TAPS)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(0, 2), unique=True), st.booleans(), st.integers(0, 5))
def test_a_tap_does_not_depend_on_the_others(taps: list[int], final: bool, seed: int) -> None:
    target = target_of("llama")
    ids_BS = tokens(1, 7, seed=seed)
    asked = (*taps, *(["final"] if final else []))
    together = target.features(ids_BS, asked)
    assert tuple(together) == asked
    for tap in asked:
        assert torch.equal(together[tap], target.features(ids_BS, (tap,))[tap])


def test_features_can_enter_a_graph_and_leave_no_hooks() -> None:
    target = target_of("llama")
    feature = target.features(tokens(1, 5), (1, "final"))["final"]
    weight = torch.ones(feature.shape[-1], requires_grad=True)
    target.lm_head(feature * weight).sum().backward()
    assert weight.grad is not None
    assert bool((weight.grad != 0).any())
    assert all(not m._forward_pre_hooks for m in target.modules())
    target.assert_frozen()


def test_autocast_around_the_target_changes_nothing() -> None:
    target = target_of("llama")
    ids_BS = tokens(1, 6)
    plain = target.features(ids_BS, TAPS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = target.features(ids_BS, TAPS)
    assert all(torch.equal(plain[tap], inside[tap]) for tap in TAPS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tokens_BS": torch.tensor([[1, VOCAB]])}, rf"token id {VOCAB} at row 0, column 1"),
        ({"tokens_BS": torch.tensor([[-1, 1]])}, "token id -1"),
        ({"tokens_BS": torch.tensor([1, 2])}, r"shape \[batch, tokens\]"),
        ({"tokens_BS": torch.zeros(1, 0, dtype=torch.long)}, "non-empty"),
        ({"tokens_BS": torch.zeros(1, 3)}, "integer token ids"),
        ({"valid_BS": torch.ones(1, 3)}, "valid_BS has shape"),
        ({"segment_BS": torch.ones(2, 4)}, "segment_BS has shape"),
        ({"position_BS": torch.zeros(4)}, "position_BS has shape"),
        ({"taps": (3,)}, "tap 3 is not a feature address"),
        ({"taps": ("last",)}, "'last' is not a feature address"),
        ({"taps": (1, 1)}, "twice"),
        ({"tokens_BS": torch.ones(1, 129, dtype=torch.long)}, "context of 128"),
    ],
)
def test_illegal_input_is_refused_with_a_way_out(arguments: dict, says: str) -> None:
    given = {"tokens_BS": torch.ones(1, 4, dtype=torch.long), "taps": ("final",), **arguments}
    with pytest.raises(ValueError, match=says):
        target_of("llama").features(given.pop("tokens_BS"), given.pop("taps"), **given)


def test_packing_may_exceed_the_context_but_a_segment_may_not() -> None:
    target = target_of("gpt2")
    ids_BS, segment_BS = tokens(1, 140), (torch.arange(140) // 70)[None]
    assert target.features(ids_BS, ("final",), segment_BS=segment_BS)["final"].shape[1] == 140
    with pytest.raises(ValueError, match="position 139 is outside"):
        target.features(ids_BS, ("final",))


def test_default_taps() -> None:
    assert default_taps(8) == (2, 4, 5)
    assert default_taps(32) == (2, 16, 29)
    for layers in range(1, 7):
        with pytest.raises(ValueError, match=r"taps=\["):
            default_taps(layers)
    assert validate_taps([0, "final"], 1) == (0, "final")
    with pytest.raises(ValueError, match="True"):
        validate_taps([True], 4)
