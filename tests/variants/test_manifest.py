"""Switches are said once, recorded whole, and compared with checkpoints that are older than some of them."""

import dataclasses
import inspect

import pytest
import yaml
from hydra import compose, initialize_config_dir

from eaglelab.cli.config import config_dir
from eaglelab.target import ManifestMismatch
from eaglelab.variants import VARIANTS, Eagle3Module, EagleModule, HassModule, OptimConfig
from eaglelab.variants.manifest import require_same_contract, require_same_weights
from tests.variants.conftest import tiny_target

EAGLE = {"supervise", "noise", "noise_scale", "regression_weight", "distillation_weight", "smooth_l1_beta"}
HASS = {"passes", "top_k", "top_weight", "renormalise_top_k", "pass_weights", "alignment", "eagle_share"}
EAGLE3 = {"supervise", "steps", "decay", "reduction", "head_init", "train_head", "feature_weight"}
BEFORE = {"eagle": EAGLE, "hass": EAGLE | HASS, "eagle3": EAGLE3}
"""What manifests held before ``labels``, ``detach``, ``fc_norm`` and ``recurrence`` existed."""
NEW = {"eagle": {"labels": "hard"}, "hass": {"labels": "hard", "detach": False}, "eagle3": {"detach": True}}


@pytest.fixture(scope="module")
def deep_target():
    return tiny_target(num_hidden_layers=8)


def build(target, name, **settings):
    return VARIANTS[name](target, OptimConfig(lr=1e-3), **settings)


def old_manifest(module):
    """As an earlier version wrote it."""
    manifest = module.manifest()
    drafter = {key: value for key, value in manifest.drafter.items() if key not in ("fc_norm", "recurrence")}
    switches = {key: manifest.switches[key] for key in BEFORE[module.variant]}
    return dataclasses.replace(manifest, drafter=drafter, switches=switches)


@pytest.mark.parametrize("name", VARIANTS)
def test_old_checkpoints_continue_with_the_defaults(deep_target, name):
    module = build(deep_target, name)
    assert set(module.manifest().switches) == BEFORE[name] | NEW[name].keys()
    require_same_contract(old_manifest(module), module)
    require_same_weights(old_manifest(module), module, "old")


@pytest.mark.parametrize(("name", "switch"), [(name, switch) for name, new in NEW.items() for switch in new])
def test_old_checkpoints_do_not_continue_under_another_setting(deep_target, name, switch):
    module = build(deep_target, name)
    changed = build(deep_target, name, **{switch: NEW[name][switch]})
    with pytest.raises(ManifestMismatch, match=f"field switches.{switch} was recorded as"):
        require_same_contract(old_manifest(module), changed)
    require_same_weights(old_manifest(module), changed, "old")  # the weights mean the same


@pytest.mark.parametrize("switch", [{"fc_norm": True}, {"recurrence": "post_norm"}])
def test_old_weights_do_not_become_another_drafter(deep_target, switch):
    module = build(deep_target, "eagle3")
    changed = build(deep_target, "eagle3", **switch)
    for check in (require_same_contract, lambda saved, now: require_same_weights(saved, now, "old")):
        with pytest.raises(ManifestMismatch, match=f"field drafter.{next(iter(switch))} was recorded as"):
            check(old_manifest(module), changed)


def test_a_switch_that_this_version_does_not_know_is_named(deep_target):
    module = build(deep_target, "eagle")
    saved = dataclasses.replace(module.manifest(), switches={**module.manifest().switches, "temperature": 2.0})
    with pytest.raises(ManifestMismatch, match=r"field switches.temperature was recorded as 2\.0 but is None"):
        require_same_contract(saved, module)


def test_manifest_holds_the_resolved_values(deep_target):
    switches = build(deep_target, "hass", passes=2, noise_scale=0.2).manifest().switches
    assert switches["pass_weights"] == [1.0, 1.0]
    assert (switches["passes"], switches["noise"], switches["noise_scale"]) == (2, "none", 0.2)


@pytest.mark.parametrize("module", [EagleModule, HassModule, Eagle3Module])
def test_configuration_has_a_line_for_every_keyword(module):
    """And no other: what a variant can be told stands in its file."""
    with open(f"{config_dir()}/variant/{module.variant}.yaml") as file:
        lines = set(yaml.safe_load(file)) - {"defaults", "_target_"}
    keywords = {field.name for field in dataclasses.fields(module.contract_type)} | {"chain_depth"}
    keywords |= set(inspect.signature(module.__init__).parameters) & {
        "taps",
        "draft_vocab_size",
        "fc_norm",
        "recurrence",
    }
    assert lines == keywords


def test_eagle_3_1_is_one_experiment():
    with initialize_config_dir(config_dir(), version_base="1.3"):
        plain, later = (compose("train", [choice]).variant for choice in ("variant=eagle3", "experiment=eagle3_1"))
    assert (plain.fc_norm, plain.recurrence) == (False, "pre_norm")
    assert (later.fc_norm, later.recurrence) == (True, "post_norm")
    changed = {name for name in plain if name != "drafter" and plain[name] != later[name]}
    assert changed == {"fc_norm", "recurrence"}


def test_an_unknown_keyword_is_refused(target):
    with pytest.raises(TypeError, match="unexpected keyword argument 'nois'"):
        build(target, "eagle", nois="none")
