"""The switches of a variant, each said once: name, type, default, meaning."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from eaglelab.data.rows import SuperviseRule


@dataclasses.dataclass(kw_only=True)
class Contract:
    """What decides the meaning of a drafter's training.

    Every field is a keyword of the variant's constructor, a line of its configuration file and an entry of the
    manifest's ``switches``. A checkpoint that was written before a switch existed counts as having its default, so a
    new switch defaults to what the variant did without it.

    Attributes:
        supervise: which rows count; applied by the data module.
    """

    supervise: SuperviseRule = "advanced"

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return dataclasses.asdict(self)


def require_one_of(name: str, value: str, known: Any) -> None:
    """Raises ValueError unless ``value`` is one of the Literal ``known``."""
    if value not in get_args(known):
        raise ValueError(f"variant.{name}={value!r} is not one of {', '.join(get_args(known))}")


def require_not_negative(contract: Contract, *names: str) -> None:
    """Raises ValueError if one of these switches is below 0, or no number."""
    for name in names:
        if not getattr(contract, name) >= 0:
            raise ValueError(f"variant.{name}={getattr(contract, name)} must not be negative; 0 switches the term off")
