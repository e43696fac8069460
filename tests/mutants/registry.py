"""What a seeded fault is, and the list of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

EAGLE_LOSS = "tests/variants/test_eagle.py::test_loss_is_the_two_published_terms"
HASS_CHAIN = "tests/variants/test_hass.py::test_passes_equal_a_sequential_cached_draft_chain"
EAGLE3_CHAIN = "tests/variants/test_eagle3.py::test_steps_equal_a_sequential_cached_draft_chain"
HASS_GOLDEN = "tests/variants/test_hass.py::test_golden_three_passes"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        trap: what is wrong, in words.
        killed_by: pytest's address of the test that must notice.
        apply: changes the loaded package, for the rest of the process.
    """

    name: str
    trap: str
    killed_by: str
    apply: Callable[[], None]

    @property
    def room(self) -> str:
        """The file that it is in."""
        return self.apply.__module__.rpartition(".")[2]


MUTANTS: dict[str, Mutant] = {}


def mutant(trap: str, killed_by: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(apply: Callable[[], None]) -> Callable[[], None]:
        assert apply.__name__ not in MUTANTS, apply.__name__
        MUTANTS[apply.__name__] = Mutant(apply.__name__, trap, killed_by, apply)
        return apply

    return register


def replace_default(function: Callable, **defaults: object) -> None:
    assert function.__kwdefaults__ is not None and defaults.keys() <= function.__kwdefaults__.keys()
    function.__kwdefaults__ |= defaults


def change_forward(owner: object, name: str, change: Callable) -> None:
    """`change(forward, target, ...)` stands for the target's forward while `owner.name` runs: no self-check sees it."""
    from eaglelab.target import FrozenTarget

    inside, work, forward = [], getattr(owner, name), FrozenTarget.forward_rows

    def working(*args, **kw):
        inside.append(True)
        try:
            return work(*args, **kw)
        finally:
            inside.pop()

    setattr(owner, name, working)
    FrozenTarget.forward_rows = lambda *args, **kw: change(forward, *args, **kw) if inside else forward(*args, **kw)


# The traps that peers fell into, each with the faults here that spring it.
TRAPS = {
    "one-row shift of features": ("feature_shift", "stored_feature_shift"),
    "one-row shift of tokens": ("token_shift",),
    "one-row shift of the loss mask": ("supervision_shift", "rollout_supervision_stays"),
    "one-row shift of targets": ("target_shift", "label_shift"),
    "taps off by one": ("taps_off_by_one", "taps_counted_alike"),
    "taps colliding": ("taps_collide",),
    "feature before the norm for the one behind it": ("feature_before_the_norm", "post_norm_recurrence"),
    "RoPE position not advanced in the rollout": ("position_stays", "position_stays_eagle3"),
    "keys of siblings visible": ("sibling_visible", "tree_siblings_visible"),
    "keys of future rows visible": ("future_visible",),
    "keys of other segments visible": ("segments_visible",),
    "keys of padding visible": ("padding_visible",),
    "softmax over scores masked by zero": ("masked_by_zero",),
    "renormalised top-K": ("renormalised_top_k",),
    "loss scale that depends on padding": ("scale_by_padding",),
    "map rebuilt under a loaded head": ("map_rebuilt",),
    "d2t read as absolute": ("d2t_read_as_absolute", "absolute_d2t"),
    "rope_theta ignored": ("rope_base_ignored",),
    "tied embeddings lost": ("tie_lost",),
    "non-strict load": ("non_strict",),
    "cache of another target revision reused": ("any_store", "any_target", "weights_not_hashed"),
    "clip by value confused with by norm": ("clip_confused",),
    "warm-up advanced per process": ("warm_up_twice",),
    "gradient accumulation wiped": ("accumulation_wiped",),
    "target left in train mode": ("target_trains",),
    "temperature skipped on the bonus token": ("bonus_unprocessed", "bonus_at_temperature_1"),
    "fp16 verification with an empty residual": ("residual_nan",),
    "EOS inside a path": ("end_token_inside",),
    "draft positions past max_position_embeddings": ("drafts_past_the_end",),
    "hidden states mixed up at batch > 1": ("rows_mixed_up", "draft_rows_mixed_up", "pending_mixed_up"),
    "Python and torch random streams both in use": ("noise_from_the_global_stream", "stream_shared"),
}
