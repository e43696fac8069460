"""Checkpoints of others: names, counts and switches that readers take differently."""

from __future__ import annotations

import torch

from tests.mutants.registry import mutant

TRIP = "tests/formats/test_round_trip.py::"


@mutant(
    "halves of fc exchanged on reading",
    "tests/formats/test_golden.py::test_the_recorded_tree[eagle2_draft_d3k4t16_s0-bin]",
)
def fc_halves_swapped() -> None:
    from eaglelab.formats import importing, tensors

    read = tensors.network_weights

    def swapped(*args):
        weights = read(*args)
        first, second = weights["fc.weight"].chunk(2, dim=1)
        return weights | {"fc.weight": torch.cat((second, first), dim=1)}

    importing.network_weights = tensors.network_weights = swapped


@mutant("a trained bias of fc left behind", TRIP + "test_bias_of_fc[with-eagle-as trained]")
def bias_left_behind() -> None:
    from eaglelab.formats import exporting

    exporting._bias = lambda *args: False


@mutant("taps counted alike by all readers", TRIP + "test_taps_by_each_readers_count")
def taps_counted_alike() -> None:
    from eaglelab.formats import layouts

    keys = layouts.fused_keys

    def same(config, name, dtype, taps, published):
        found = keys(config, name, dtype, taps, published)
        if "eagle_config" in found:
            found["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps)}
        return found

    layouts.fused_keys = same


@mutant("norm_before_residual not written out", TRIP + "test_speculators_config")
def switch_not_written() -> None:
    from eaglelab.formats import layouts

    keys = layouts.speculators_keys

    def shorter(*args):
        found = keys(*args)
        del found["norm_before_residual"]
        return found

    layouts.speculators_keys = shorter
