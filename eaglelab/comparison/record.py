"""``comparison.json``: what was asked; a later call in the folder goes on with the same thing, or refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglelab.comparison.budget import Spent
from eaglelab.comparison.plan import Plan
from eaglelab.features.manifest import software_versions
from eaglelab.target.fingerprint import TargetFingerprint

FORMAT = 1
NAME = "comparison.json"


class Record:
    """The plan beside what it came to: target, versions, and the optimizer steps of every name.

    Args:
        plan: what is asked now.

    Raises:
        ValueError: the folder holds a comparison in which a drafter of the same name is something else.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.path = plan.out / NAME
        self._old = self._read()
        self.spent: dict[str, Spent] = {}
        self.target: TargetFingerprint | None = None
        self.runs: dict[str, dict[str, Any]] = {}
        for name in plan.names:
            self._check(name)

    def _read(self) -> dict[str, Any]:
        if not self.path.is_file():
            return {}
        try:
            old = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged ({error}); restore it, or choose another out=") from error
        if old.get("format") != FORMAT:
            raise ValueError(
                f"{self.path} has format {old.get('format')!r}, this eaglelab writes {FORMAT}; choose another out="
            )
        return old

    def _check(self, name: str) -> None:
        asked = self._definition(name)
        was = self._old.get("drafters", {}).get(name)
        if was is None:
            return
        for field, value in asked.items():
            if was["definition"].get(field) != value:
                raise ValueError(
                    f"{self.plan.out} already holds a drafter {name} with {field} {was['definition'].get(field)!r}, "
                    f"asked is {value!r}; ask for the recorded one, give the new one another "
                    "name, or choose another out="
                )
        if was["spent"] is not None:
            self.spent[name] = Spent(**was["spent"])

    def _definition(self, name: str) -> dict[str, Any]:
        """What makes a drafter of this name what it is."""
        if name in self.plan.given:
            return {"runs": [str(Path(one).resolve()) for one in self.plan.given[name]]}
        return {
            "recipe": [*self.plan.train, *self.plan.recipes[name]],
            "budget": {"unit": self.plan.budget.unit, "value": self.plan.budget.of(name)},
        }

    def meet(self, whose: str, target: TargetFingerprint) -> None:
        """Note the target of a drafter, which is that of all.

        Raises:
            ValueError: an earlier drafter, here or in the folder, was trained for another one.
        """
        was = TargetFingerprint.from_dict(self._old["target"]) if "target" in self._old else None
        for known, where in ((self.target, "the others"), (was, str(self.plan.out))):
            if known is not None and not known.same_target(target):
                raise ValueError(
                    f"{whose}: drafters of target {target.source} (weights {target.weights[:12]}) cannot be compared "
                    f"with {where}, of {known.source} (weights {known.weights[:12]}); choose another out=, or set "
                    "train=['target=...'] to train for the same one"
                )
        self.target = target

    def add_run(self, label: str, fields: Mapping[str, Any]) -> None:
        """What is known about a run, under its folder's name."""
        self.runs[label] = dict(fields)

    def save(self) -> None:
        """Write the file; the old one stays whole until the new one is."""
        assert self.target is not None
        drafters = {
            name: {
                "definition": self._definition(name),
                "spent": self.spent[name].to_dict() if name in self.spent else None,
            }
            for name in self.plan.names
        }
        content = {
            "format": FORMAT,
            **self.plan.to_dict(),
            "target": self.target.to_dict(),
            "versions": software_versions(),
            "drafters": {**self._old.get("drafters", {}), **drafters},
            "runs": self.runs,
        }
        write_json(self.path, content)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file aside and rename it, so that it is whole at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)
