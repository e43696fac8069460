"""Feature addresses: which tensors of the target a drafter reads.

A tap is either an integer or the word ``"final"``:

* ``k``: the residual stream *entering* decoder layer ``k``, before that layer's norm. It is
  ``hidden_states[k]`` of a Hugging Face output tuple.
* ``"final"``: the output of the final norm, that is, the LM head's input (the second-to-top-layer
  feature of EAGLE-1, EAGLE-2 and HASS).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Tap = int | Literal["final"]

FINAL: Literal["final"] = "final"


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The three taps of EAGLE-3: the inputs of layers 2, L // 2 and L - 3.

    Raises:
        ValueError: the target has fewer than 7 layers, where the three collide or change order.
    """
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if not low < middle < high:
        raise ValueError(
            f"a target of {num_layers} layers has no three distinct default taps: "
            f"2, L // 2 and L - 3 give {low}, {middle} and {high}. Name the taps yourself, "
            f"for example taps=[0, {max(1, num_layers // 2)}, {num_layers - 1}], "
            "or take a target with at least 7 layers."
        )
    return low, middle, high


def validate_taps(taps: Iterable[object], num_layers: int) -> tuple[Tap, ...]:
    """Check the taps against a target of ``num_layers`` layers and return them as a tuple.

    Raises:
        ValueError: a tap is no integer in [0, L), not ``"final"``, or is asked twice.
    """
    checked: list[Tap] = []
    for tap in taps:
        if tap == FINAL:
            checked.append(FINAL)
        elif isinstance(tap, int) and not isinstance(tap, bool) and 0 <= tap < num_layers:
            checked.append(tap)
        else:
            raise ValueError(
                f"tap {tap!r} is not a feature address of a target with {num_layers} layers: "
                f'use an integer from 0 to {num_layers - 1} (the input of that layer) or "final" '
                "(the output of the final norm)."
            )
    if len(set(checked)) != len(checked):
        raise ValueError(f"taps {tuple(checked)} name one feature twice: give each address once.")
    return tuple(checked)
