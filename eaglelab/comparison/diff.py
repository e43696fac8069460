"""What separates runs: contract switches, data, recipe, budget and versions, from what their folders say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from eaglelab.target import FeatureManifest
from eaglelab.training import RunFolder

MISSING = "-"
SECTIONS = ("contract", "target", "data", "recipe", "budget", "versions")

_PATHS = ("default_root_dir", "save_dir", "dirpath")  # where a run lies says nothing about it
_BUDGET = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")
_FOLLOWS_BUDGET = ("trainer.val_check_interval",)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field in which runs differ.

    values: run -> value; `-` where a run has no such field.
    """

    section: str
    field: str
    values: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {"section": self.section, "field": self.field, "values": dict(self.values)}


def differences(runs: Mapping[str, str | Path]) -> list[Difference]:
    """Fields that are not the same in all of the runs, by section.

    Measured times are left out: no two runs agree in them.

    Args:
        runs: label -> run folder.

    Raises:
        ValueError: a folder that holds no run.
    """
    described = {label: describe(path) for label, path in runs.items()}
    fields = dict.fromkeys(key for one in described.values() for key in one)
    found = []
    for section, field in sorted(fields, key=lambda key: SECTIONS.index(key[0])):
        values = {label: one.get((section, field), MISSING) for label, one in described.items()}
        if any(value != next(iter(values.values())) for value in values.values()):
            found.append(Difference(section, field, values))
    return found


def describe(path: str | Path) -> dict[tuple[str, str], Any]:
    """(section, field) -> value of everything that a run's folder says about what it is."""
    folder = RunFolder.existing(path)
    fields = _manifest_fields(folder.manifest())
    fields |= _configuration_fields(run_configuration(folder))
    fields |= _figure_fields(folder.read_metrics().get("training") or {})
    return fields


def _manifest_fields(manifest: FeatureManifest) -> dict[tuple[str, str], Any]:
    values = manifest.to_dict()
    fields: dict[tuple[str, str], Any] = {}
    target = values.pop("target")
    fields |= {("target", name): target[name] for name in ("source", "revision", "config", "weights", "tokenizer")}
    for name in ("head", "embedding", "feature_dtype"):
        fields["target", name] = values.pop(name)
    fields |= {("versions", name): value for name, value in values.pop("software").items()}
    fields["versions", "manifest format"] = values.pop("format")
    switches = values.pop("switches")
    fields |= {("contract", name): value for name, value in _flat("", {**values, **switches})}
    return fields


def run_configuration(folder: RunFolder) -> DictConfig:
    """The resolved configuration that a run was trained with; empty where there is none (an imported drafter)."""
    path = folder.path / ".hydra" / "config.yaml"
    config = OmegaConf.create(path.read_text(encoding="utf-8") if path.is_file() else "{}")
    assert isinstance(config, DictConfig)
    config.run_dir = ""  # interpolates Hydra's, which is not here
    return config


def _configuration_fields(config: DictConfig) -> dict[tuple[str, str], Any]:
    fields: dict[tuple[str, str], Any] = {}
    for group in ("data", "optim", "trainer", "seed", "deterministic", "init_from", "stages"):
        if group not in config:
            continue
        value = config[group]
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, one in _flat(group, plain):
            if not name.endswith(_PATHS) and name not in _FOLLOWS_BUDGET:
                section = "budget" if name in _BUDGET else "data" if group == "data" else "recipe"
                fields[section, name] = one
    return fields


def _figure_fields(training: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    fields: dict[tuple[str, str], Any] = {}
    for name in ("optimizer_steps", "micro_steps", "skipped_batches", "supervised_rows"):
        if name in training:
            fields["budget", name] = training[name]
    for name in ("device", "processes", "drafter_parameters"):
        if name in training:
            fields["recipe", name] = training[name]
    fields |= {("data", name): value for name, value in _flat("features", training.get("features") or {})}
    for split, report in (training.get("data") or {}).items():
        fields |= {("data", f"{split}.{name}"): value for name, value in _flat("", report or {})}
    return fields


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(f"{name}.{key}" if name else str(key), inner)]
    return [(name, value)]


def merged_seeds(found: Sequence[Difference], names: Mapping[str, str]) -> list[Difference]:
    """Differences between drafters, with one column per name where its training seeds agree.

    Args:
        names: label of a run -> name of its drafter.

    What differs between the seeds of one drafter alone, the seed first of all, is left with its labels.
    """
    merged = []
    for one in found:
        by_name: dict[str, list[Any]] = {}
        for label, value in one.values.items():
            by_name.setdefault(names[label], []).append(value)
        if all(value == values[0] for values in by_name.values() for value in values):
            merged.append(dataclasses.replace(one, values={name: values[0] for name, values in by_name.items()}))
        else:
            merged.append(one)
    return merged


def diff_table(found: Sequence[Difference], *, width: int = 100) -> str:
    """The differences for reading; equal runs say so."""
    if not found:
        return "no difference: contract, target, data, recipe, budget and versions are the same"
    lines: list[str] = []
    for section in SECTIONS:
        members = [one for one in found if one.section == section]
        if members:
            lines += ["", section] if lines else [section]
            lines += [line for one in members for line in _lines(one, width)]
    return "\n".join(lines)


def _lines(one: Difference, width: int) -> list[str]:
    shown = ", ".join(f"{label} {_shown(value)}" for label, value in one.values.items())
    line = f"  {one.field:<28} {shown}"
    if len(line) <= width:
        return [line]
    return [f"  {one.field}", *(f"      {label:<18} {_shown(value)}" for label, value in one.values.items())]


def _shown(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value):
        return value[:12]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return "none" if value is None else str(value)
