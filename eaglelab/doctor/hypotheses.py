"""The single faults that are common, each as the wiring under which such weights would be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from eaglelab.doctor import rewiring
from eaglelab.doctor.wiring import LAST_STREAM, Address, Wiring
from eaglelab.drafters import DraftNetwork, FusedDrafter
from eaglelab.target import FrozenTarget, Tap

ALIVE, TOLD = 0.25, 0.6
BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One wiring that weights may have been trained for.

    Attributes:
        name: short and stable.
        trained: what the weights were trained with, as the end of a sentence.
        change: what to do about it.
        floor: one-step accuracy below which it cannot be what the weights were trained for. Wirings that show the
            drafter what it is to predict help any drafter a little, and one that was trained so is nearly always right.
    """

    name: str
    trained: str
    change: str
    wiring: Wiring
    floor: float = ALIVE


def hypotheses_for(network: DraftNetwork, target: FrozenTarget, taps: tuple[Tap, ...]) -> list[Hypothesis]:
    """The wiring as declared, named ``declared``, and then every single fault that applies to this drafter."""
    declared = Wiring(taps)
    found = [Hypothesis("declared", "the wiring that is declared", "nothing", declared)]
    found += _addresses(declared)
    found += _rotary(network, declared, target)
    found += _fused(network, target, declared) if isinstance(network, FusedDrafter) else _feature(target, declared)
    assert len({one.name for one in found}) == len(found)
    return found


def _with(declared: Wiring, name: str, trained: str, change: str, floor: float = ALIVE, **changes: Any) -> Hypothesis:
    return Hypothesis(name, trained, change, dataclasses.replace(declared, **changes), floor)


def _addresses(declared: Wiring) -> Iterator[Hypothesis]:
    """Off by one, in every direction."""
    yield _with(
        declared,
        "token_late",
        "the embedding of the source token x_t in place of the advanced token x_{t+1}",
        "pair f_t with x_{t+1} in training (contracts, section 2); such weights waste what the last token tells",
        token_shift=-1,
    )
    yield _with(
        declared,
        "token_early",
        "the embedding of x_{t+2}, the very token that is to be predicted",
        "train again: decoding does not know that token",
        floor=TOLD,
        token_shift=1,
    )
    yield _with(
        declared,
        "feature_late",
        "features of the token before, f_{t-1} beside x_{t+1}",
        "shift the features by one in training or in the server that reads these weights",
        feature_shift=-1,
    )
    yield _with(
        declared,
        "feature_early",
        "features of the token after, f_{t+1} beside x_{t+1}",
        "train again with f_t: decoding does not have that feature yet",
        floor=TOLD,
        feature_shift=1,
    )
    yield _with(
        declared,
        "positions_stay",
        "draft steps that keep the rotary position of their root",
        "let the position of draft step s be t + s, in training",
        steps="stay",
    )
    yield _with(
        declared,
        "positions_ahead",
        "draft steps one rotary position too far",
        "let the position of draft step s be t + s, in training",
        steps="ahead",
    )


def _rotary(network: DraftNetwork, declared: Wiring, target: FrozenTarget) -> Iterator[Hypothesis]:
    rope = network.config.rope_parameters
    base, law = float(rope.get("rope_theta", 10_000.0)), rope.get("rope_type", "default")
    own = getattr(target.text_config, "rope_parameters", None) or {}
    known = {float(own["rope_theta"])} if isinstance(own.get("rope_theta"), int | float) else set()
    for theta in sorted({*BASES, *known}):
        if theta != base or law != "default":
            yield _with(
                declared,
                f"rope_{theta:g}",
                f"rotary base {theta:g}, unscaled",
                f"set rope_theta to {theta:g} in the drafter's config (declared: {base:g}, {law})",
                rewire=rewiring.rotary_base(theta),
            )
    yield _with(
        declared,
        "rope_interleaved",
        "rotary positions on neighbouring pairs (GPT-J layout)",
        "reorder the rows of q_proj and k_proj into two halves per head when converting",
        rewire=rewiring.interleaved_rotary,
    )


def _feature(target: FrozenTarget, declared: Wiring) -> Iterator[Hypothesis]:
    yield _with(
        declared,
        "fc_swapped",
        "[feature; embedding] as the input of fc",
        "exchange the two halves of fc.weight's columns: fc reads [embedding; feature]",
        rewire=rewiring.swap_fc,
    )
    yield _with(
        declared,
        "layer_below",
        f"features one layer lower, the stream entering layer {target.num_layers - 1}",
        "train on the final norm's output, which is hidden_states[-1] of transformers",
        taps=(target.num_layers - 1,),
    )
    if target.final_norm is not None:
        yield _with(
            declared,
            "pre_norm",
            "streams before the target's final norm, which then comes before the head",
            "train on the final norm's output, or serve them where drafted features are normed before the head",
            taps=(LAST_STREAM,),
            rewire=rewiring.final_norm_before_head(target),
        )


def _fused(network: FusedDrafter, target: FrozenTarget, declared: Wiring) -> Iterator[Hypothesis]:
    for name, by in (("taps_lower", -1), ("taps_higher", 1)):
        taps = tuple(_moved(tap, by, target.num_layers) for tap in declared.taps)
        if None not in taps:
            yield _with(
                declared,
                name,
                f"taps {_listed(taps)}, one layer {'lower' if by < 0 else 'higher'} than declared",
                f"declare taps={_listed(taps)}: some projects count the layer before a stream, some the one behind",
                taps=taps,
            )
    for order in sorted(set(permutations(declared.taps)) - {declared.taps}, key=str):
        yield _with(
            declared,
            "taps_" + "_".join(str(tap) for tap in order),
            f"the taps in the order {_listed(order)}",
            f"declare taps={_listed(order)}, or reorder the blocks of fc.weight's columns",
            taps=order,
        )
    yield _with(
        declared,
        "attention_swapped",
        "[norm(h); norm(e)] as the input of attention",
        "exchange the two halves of the columns of q_proj, k_proj and v_proj: attention reads [norm(e); norm(h)]",
        rewire=rewiring.swap_attention_input,
    )
    yield _with(
        declared,
        "norms_swapped",
        "the norms of embedding and state exchanged",
        "exchange input_layernorm and hidden_norm: the first one is the embedding's",
        rewire=rewiring.swap_norms,
    )
    yield _with(
        declared,
        "residual_normed",
        "the normed state as the residual of attention",
        "train with the state before hidden_norm as the residual, or serve with norm_before_residual=true",
        rewire=rewiring.normed_residual,
    )
    other = "pre_norm" if network.recurs_normed else "post_norm"
    yield _with(
        declared,
        f"recurrence_{other}",
        f"the state fed back {'before' if network.recurs_normed else 'after'} the final norm",
        f"declare variant.recurrence={other}",
        rewire=rewiring.other_recurrence,
    )
    if not network.recurs_normed:
        yield _with(
            declared,
            "head_without_norm",
            "a head that reads the state before the final norm",
            "fold the norm into the head, or train again",
            rewire=rewiring.head_without_norm,
        )
    yield _with(
        declared,
        "head_of_target",
        "the target's head",
        "export the target's head rows with the drafter, or declare no head of its own",
        rewire=rewiring.head_of_target,
    )
    if network.ids_K is not None:
        yield _with(
            declared,
            "map_missing",
            "draft ids that are target ids",
            "drop d2t and t2d: the head's rows are the first target ids",
            rewire=rewiring.unmapped,
        )


def _moved(tap: Address, by: int, num_layers: int) -> Address | None:
    if isinstance(tap, int) and 0 <= tap + by < num_layers:
        return tap + by
    return LAST_STREAM if isinstance(tap, int) and tap + by == num_layers else None


def _listed(taps: tuple[Any, ...]) -> str:
    return "[" + ",".join("the last stream" if tap == LAST_STREAM else str(tap) for tap in taps) + "]"
