"""What a target is, found out by asking it: how it embeds, how its head ends, whether trees are exact.

A wrapper that has to serve every causal LM cannot know each family's code. Instead of trusting
names alone, a four-token question is put to the model once, and the answers must agree with what
the wrapper will compute later. A model for which they do not agree is refused with the reason.

Letters: B batch, S tokens, d hidden, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eaglelab.target.kv import KVSlots, LayerShape
from eaglelab.target.taps import FINAL

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget


@dataclass(frozen=True)
class HeadForm:
    """logits = cap * tanh(multiply * W h / divide / cap), the cap and the factors optional."""

    multiply: float = 1.0
    divide: float = 1.0
    cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        if self.multiply != 1.0:
            logits = logits * self.multiply
        if self.divide != 1.0:
            logits = logits / self.divide
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits

    @property
    def linear(self) -> bool:
        return self == HeadForm()


def max_positions(text_config: Any) -> int:
    """Largest number of positions at which row features do not depend on the row's company.

    Long-context RoPE that switches its frequencies past the original length ("longrope") would
    change the keys already in the cache; such a target serves up to that original length.
    """
    limit = int(getattr(text_config, "max_position_embeddings", None) or 2**31 - 1)
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in nested or [rope]:
        if parameters.get("rope_type") == "longrope":
            original: Any = parameters.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", limit
            )
            limit = min(limit, int(original))
    return limit


def question(vocab_size: int, device: torch.device) -> Tensor:
    """Two rows of four tokens that differ in the last token only, [2, 4]."""
    row = [(7 * i + 1) % vocab_size for i in range(5)]
    return torch.tensor([row[:4], [*row[:3], row[4]]], device=device)


def check_finite(model: nn.Module, logits_BSV: Tensor) -> None:
    """Refuse NaN or infinite logits, naming the first bad tensor if the weights are at fault.

    Raises:
        ValueError: the logits are not finite.
    """
    if bool(torch.isfinite(logits_BSV).all()):
        return
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"target weights: tensor {name!r} holds NaN or infinite values. The checkpoint is "
                "broken or was saved in a type that overflowed; download or convert it again."
            )
    raise ValueError(
        "the target's logits are not finite although its weights are: its type overflows. Load it "
        'with dtype="bfloat16" or dtype="float32".'
    )


def check_streams(tapped: Mapping[Any, Tensor], final_BSd: Tensor, name: str) -> None:
    """Refuse decoders whose layers do not pass one residual stream of the final feature's shape.

    Raises:
        ValueError: several parallel streams, or a stream that a layer overwrote in place.
    """
    for tap, stream_BSd in tapped.items():
        if stream_BSd.shape != final_BSd.shape or stream_BSd._version != 0:
            raise ValueError(
                f"{name}: the input of decoder layer {tap} is no plain residual stream (shape "
                f"{tuple(stream_BSd.shape)} against {tuple(final_BSd.shape)}, or overwritten by "
                "the layer), so it cannot serve as a feature. Choose another target."
            )


def check_causal(logits_BSV: Tensor, name: str) -> None:
    """The two questions differ in the last token: earlier logits must not.

    Raises:
        ValueError: they do; the model looks ahead.
    """
    early_BSV = logits_BSV[:, :-1]
    allowed = tolerance(logits_BSV.dtype) * float(early_BSV.abs().max()) + 1e-30
    if float((early_BSV[0] - early_BSV[1]).abs().max()) > allowed:
        raise ValueError(
            f"{name}: changing the last token changes earlier predictions, so this is no causal "
            "language model. Choose a decoder-only target."
        )


def check_tree(target: FrozenTarget) -> tuple[LayerShape, ...]:
    """Run a small tree once and compare each path with the same path as plain text.

    Returns:
        The key and value shapes of every layer, for one shared buffer.

    Raises:
        ValueError: the target cannot take trees exactly.
    """
    name = type(target.model).__name__
    device = target.device
    prefix_1S = question(target.vocab_size, device)[:1]
    left, right, leaf = ((11 + 5 * i) % target.vocab_size for i in range(3))
    rows_1N = torch.tensor([[left, right, leaf]], device=device)  # leaf is a child of left
    position_1N = torch.tensor([[4, 4, 5]], device=device)
    ancestor_1NN = torch.tensor([[[True, False, False], [False, True, False], [True, False, True]]], device=device)
    cache = KVSlots(1, 8)
    way_out = "Use it for training only, or choose another target."
    try:
        target.forward_rows(prefix_1S, None, cache)
        cache.commit(None, [4])
        tree = target.forward_rows(rows_1N, position_1N, cache, ancestor_BNN=ancestor_1NN, taps=(FINAL,))
    except Exception as error:
        raise ValueError(f"{name} cannot verify draft trees: {type(error).__name__}: {error}. {way_out}") from error
    paths = ([left, leaf], [right, right])
    text_BS = torch.cat([prefix_1S.expand(2, 4), torch.tensor(paths, device=device)], dim=1)
    plain_BSd = target.features(text_BS, (FINAL,))[FINAL]
    wanted_Nd = torch.stack([plain_BSd[0, 4], plain_BSd[1, 4], plain_BSd[0, 5]]).double()
    got_Nd = tree.features[FINAL][0].double()
    error_size = float((got_Nd - wanted_Nd).norm() / wanted_Nd.norm())
    allowed = 1e-3 if torch.finfo(target.dtype).eps < 1e-6 else 0.5  # half: only gross errors show
    if error_size > allowed:
        raise ValueError(
            f"{name} cannot verify draft trees: a tree row differs from the same text decoded "
            f"alone by {error_size:.1e} (allowed {allowed:.0e}); its attention does not follow "
            f"the mask and position ids it is given. {way_out}"
        )
    return cache.layer_shapes()


def tolerance(dtype: torch.dtype) -> float:
    """Relative tolerance for two ways of computing one thing in this type."""
    return 1e-4 if torch.finfo(dtype).eps < 1e-6 else 3e-2


def embedding_scale(text_config: Any, embedded_BSd: Tensor, entering_BSd: Tensor, name: str) -> float:
    """The factor between the embedding module's output and the input of layer 0.

    The two rows of `question` differ in the last token only; the difference cancels learned
    position vectors, so that a GPT-2 has factor 1.

    Raises:
        ValueError: layer 0 is not fed a multiple of the embedding.
    """
    raw_d = (embedded_BSd[0, -1] - embedded_BSd[1, -1]).double()
    fed_d = (entering_BSd[0, -1] - entering_BSd[1, -1]).double()
    energy = float(raw_d @ raw_d)
    scale = float(raw_d @ fed_d) / energy if energy > 0 else 1.0
    slack = tolerance(embedded_BSd.dtype)
    if float((fed_d - scale * raw_d).abs().max()) > slack * float(fed_d.abs().max()) + 1e-30:
        raise ValueError(
            f"{name}: layer 0 is fed something other than a multiple of the token embedding (an "
            "embedding norm or projection?), so a drafter could not share the embedding. "
            "Choose another target."
        )
    width = embedded_BSd.shape[-1]
    named = [getattr(text_config, key, None) for key in ("embedding_multiplier", "scale_emb")]
    known = [1.0, width**0.5, *(float(value) for value in named if value)]
    return next((k for k in known if math.isclose(scale, k, rel_tol=slack)), scale)


def head_form(text_config: Any, raw_BSV: Tensor, logits_BSV: Tensor, name: str) -> HeadForm:
    """Find how the model turns ``W h`` into logits, from its config and its own answer.

    Raises:
        ValueError: no known form reproduces the model's logits.
    """
    cap = getattr(text_config, "final_logit_softcapping", None)
    multiply = getattr(text_config, "logit_scale", None)
    divide = getattr(text_config, "logits_scaling", None)
    forms = [HeadForm(cap=cap)]
    if isinstance(multiply, int | float):
        forms.append(HeadForm(multiply=float(multiply), cap=cap))
    if isinstance(divide, int | float):
        forms += [
            HeadForm(divide=float(divide), cap=cap),
            HeadForm(multiply=float(divide), cap=cap),
        ]
    allowed = tolerance(raw_BSV.dtype) * float(logits_BSV.abs().max()) + 1e-30
    errors = [float((form.apply(raw_BSV) - logits_BSV).abs().max()) for form in forms]
    best = min(range(len(forms)), key=errors.__getitem__)
    if errors[best] > allowed:
        raise ValueError(
            f"{name}: its head applied to its final feature differs from its own logits by "
            f"{errors[best]:.2e} (allowed {allowed:.2e}), so an unknown step lies between them and "
            "a drafter trained on the feature would learn the wrong distribution. Choose another "
            "target, or teach eaglelab/target/probe.py the family's head."
        )
    return forms[best]
