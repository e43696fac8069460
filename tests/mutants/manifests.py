"""What a checkpoint says, and whether it is believed."""

from __future__ import annotations

import dataclasses

from tests.mutants.registry import mutant


@mutant("rope_theta ignored", "tests/drafters/test_feature.py::test_rope_base_comes_from_the_target_everywhere")
def rope_base_ignored() -> None:
    from eaglelab.drafters import DrafterConfig

    to_llama = DrafterConfig.to_llama

    def fixed(self):
        config = to_llama(self)
        config.rope_parameters["rope_theta"] = 10000.0
        return config

    DrafterConfig.to_llama = fixed


@mutant("non-strict load", "tests/cli/test_evaluate.py::test_a_checkpoint_without_a_tensor_is_refused")
def non_strict() -> None:
    from torch import nn

    load = nn.Module.load_state_dict
    nn.Module.load_state_dict = lambda self, state, strict=True, assign=False: load(self, state, False, assign)


@mutant(
    "a checkpoint without a switch is taken for another setting",
    "tests/variants/test_manifest.py::test_old_checkpoints_continue_with_the_defaults",
)
def no_defaults() -> None:
    from eaglelab.variants import manifest

    manifest.with_defaults = lambda saved, module: saved


@mutant(
    "another target is taken for the recorded one",
    "tests/target/test_manifest.py::test_a_difference_names_field_values_and_way_out[target]",
)
def any_target() -> None:
    from eaglelab.target import FeatureManifest

    require_same = FeatureManifest.require_same

    def without_target(self, other, *args, **kw):
        require_same(self, dataclasses.replace(other, target=self.target), *args, **kw)

    FeatureManifest.require_same = without_target


@mutant("weights do not enter the fingerprint", "tests/target/test_fingerprint.py::test_one_changed_weight_changes_it")
def weights_not_hashed() -> None:
    from eaglelab.target import frozen

    fingerprint = frozen.fingerprint_target
    frozen.fingerprint_target = lambda target: dataclasses.replace(fingerprint(target), weights="0" * 64)
