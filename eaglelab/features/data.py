"""The data module of a feature store: the rows that were cached, in the order that they would have had online."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglelab.data import DataReport
from eaglelab.data.module import PackedDataModule
from eaglelab.data.rows import SuperviseRule
from eaglelab.features.plan import ROW_SETTINGS
from eaglelab.features.store import FeatureStore


class StoreDataModule(PackedDataModule):
    """Rows and features of a store.

    Args:
        store: the opened store.
        supervise, seed: of the run.
        settings: the run's data settings. ``batch_size`` and ``num_workers`` are free; those that decide which rows
            there are must be None, for the store's, or equal to it.

    Raises:
        ValueError: a setting that differs from the store's.
    """

    def __init__(
        self, store: FeatureStore, *, supervise: SuperviseRule, seed: int, settings: Mapping[str, Any]
    ) -> None:
        asked = dict(settings)
        batch_size, num_workers = asked.pop("batch_size"), asked.pop("num_workers")
        super().__init__(batch_size=batch_size, supervise=supervise, seed=seed, num_workers=num_workers)
        self.store = store
        require_same_data(store, asked | {"supervise": supervise})
        self.padded_length = store.plan.data["row_length"] if store.plan.data["packing"] else None

    @property
    def report(self) -> DataReport:
        return self.store.plan.report

    def setup(self, stage: str | None = None) -> None:
        """Read tokens, answers and segments; features are read row by row."""
        if self._splits is None:
            train = self.store.rows("train")
            assert train is not None, "every store has training rows"
            self._splits = train, self.store.rows("val")


def require_same_data(store: FeatureStore, asked: Mapping[str, Any]) -> None:
    """Refuse data settings that are not those of the store.

    Raises:
        ValueError: names the setting, both values and the way out.
    """
    recorded = store.plan.data
    for name, value in asked.items():
        setting = f"variant.{name}" if name == "supervise" else f"data.{name}"
        if value is None:
            continue
        if name not in ROW_SETTINGS:
            raise ValueError(f"{setting}={value}: the rows come from {store.path}; leave {setting} out, or cache again")
        here = template_digest(value) if name == "chat_template" else value
        if here != recorded[name]:
            raise ValueError(
                f"{setting}={value} but the feature store {store.path} was cached with {recorded[name]}; leave "
                f"{setting} out, or cache again with it"
            )


def template_digest(path: str | Path | None) -> str | None:
    """Identity of a chat template's file."""
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
