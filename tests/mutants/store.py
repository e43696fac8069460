"""Stored features."""

from __future__ import annotations

from tests.mutants.registry import mutant

STORE = "tests/features/test_store.py::"


@mutant(
    "stored features shifted by one token",
    STORE + "test_batches_are_those_of_the_rows_online_with_the_targets_features[True]",
)
def stored_feature_shift() -> None:
    from eaglelab.features.store import FeatureStore

    read = FeatureStore.read

    def shifted(self, *args):
        return {name: part.roll(1, 0) for name, part in read(self, *args).items()}

    FeatureStore.read = shifted


@mutant("a store of another target reused", STORE + "test_another_targets_store_is_refused")
def any_store() -> None:
    from eaglelab.features.store import FeatureStore

    FeatureStore.require = lambda self, target, taps: None


@mutant(
    "an unfinished shard taken for a finished one",
    "tests/features/test_writer.py::test_a_damaged_shard_is_written_again",
)
def trusted_shards() -> None:
    from eaglelab.features.writer import StoreWriter

    StoreWriter._is_whole = lambda self, shard: (self.out / shard.file).is_file()
