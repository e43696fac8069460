"""What a store gives back, what it refuses, and which damage it notices."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from eaglelab.data import RowLoader
from eaglelab.features.data import StoreDataModule
from eaglelab.features.store import FeatureStore, StoreFeatures
from eaglelab.features.verify import verify
from eaglelab.target import ManifestMismatch
from tests.features.conftest import SETTINGS, TAPS, packed_rows, prepared
from tests.variants.conftest import tiny_target


def read_everything(path) -> None:
    store = FeatureStore(path)
    for split in store.plan.splits:
        for row in store.rows(split):
            assert row.features


@pytest.mark.parametrize("packing", [True, False])
def test_batches_are_those_of_the_rows_online_with_the_targets_features(store, deep_target, packing):
    opened, data = store(), prepared()
    stored = opened.rows("train")
    assert stored.digest == data.train_rows.digest
    options = {"batch_size": 2, "row_length": 24 if packing else None, "seed": 5}
    taps = (*TAPS, "final")
    pairs = zip(RowLoader(stored, **options), RowLoader(data.train_rows, **options), strict=True)
    for offline, online in pairs:
        for field in ("tokens_BS", "valid_BS", "segment_BS", "position_BS", "answer_BS"):
            assert torch.equal(getattr(offline, field), getattr(online, field))
        assert torch.equal(offline.rows.source_BR, online.rows.source_BR)
        wanted = deep_target.features(
            online.tokens_BS,
            taps,
            valid_BS=online.valid_BS,
            segment_BS=online.segment_BS,
            position_BS=online.position_BS,
        )
        found = StoreFeatures(opened, deep_target).of(offline, TAPS)
        for tap in taps:
            here = found.streams[tap][online.valid_BS]
            torch.testing.assert_close(here, wanted[tap][online.valid_BS], rtol=1e-5, atol=1e-5)
        assert found.teacher_BSw is found.streams["final"]


def test_worker_processes_read_the_same(store):
    rows = store().rows("train")
    rows[0]  # a handle that must not be shared with the workers
    options = {"batch_size": 2, "seed": 1}
    pairs = zip(RowLoader(rows, **options), RowLoader(rows, **options, num_workers=2), strict=True)
    for here, there in pairs:
        assert all(torch.equal(here.features[name], there.features[name]) for name in here.features)


def test_a_store_holds_what_the_variant_reads_and_nothing_else(store):
    assert store(taps=("final",)).rows("train")[0].features.keys() == {"final"}
    assert store("top", top_k=5).rows("train")[0].features.keys() == {
        *(str(tap) for tap in TAPS),
        "teacher.ids",
        "teacher.logp",
        "teacher.outside",
    }


def test_a_store_of_more_streams_serves_variants_that_read_fewer(store, deep_target):
    opened = store()
    opened.require(deep_target, ("final",))
    assert opened.rows("train")[0].features.keys() == {"final"}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("target.weights", {"target": {"weights": "0" * 64}}),
        ("target.config", {"target": {"config": "0" * 64}}),
        ("target.tokenizer", {"target": {"tokenizer": "0" * 64}}),
        ("taps", {"taps": (1, 4, 5)}),
        ("tap_norm", {"tap_norm": "post"}),
        ("feature_dtype", {"feature_dtype": "bfloat16"}),
        ("dtype_policy.target", {"dtype_policy": {"target": "bfloat16"}}),
        ("layout", {"layout": "S B d"}),
    ],
)
def test_a_store_of_something_else_is_refused_with_the_field(store, deep_target, field, change):
    opened = store()
    if "target" in change:
        change = {"target": dataclasses.replace(opened.manifest.target, **change["target"])}
    opened.manifest = dataclasses.replace(opened.manifest, **change)
    opened.plan = dataclasses.replace(
        opened.plan, contents=dataclasses.replace(opened.plan.contents, streams=opened.manifest.taps)
    )
    with pytest.raises(ManifestMismatch) as refused:
        opened.require(deep_target, TAPS)
    assert refused.value.field == field
    assert "does not fit" in str(refused.value) and "Way out" in str(refused.value)


def test_another_targets_store_is_refused(store):
    with pytest.raises(ManifestMismatch, match=r"target\.weights was recorded as"):
        store().require(tiny_target(seed=1, num_hidden_layers=8), TAPS)


def test_streams_that_are_not_stored_are_refused(store, deep_target):
    with pytest.raises(ManifestMismatch, match="field taps"):
        store(top_k=4).require(deep_target, ("final",))
    with pytest.raises(ManifestMismatch, match="field taps"):
        store("final", taps=("final",)).require(deep_target, TAPS)


# ---- damage ------------------------------------------------------------------------------------------------------


def files_of(path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if not file.name.endswith(".xxh128"))


def test_a_flipped_byte_is_noticed_in_every_file_and_named(store, tmp_path):
    opened = store()
    random = np.random.default_rng(0)
    for name in files_of(opened.path):
        for _ in range(3):
            shutil.copytree(opened.path, tmp_path / "damaged")
            file = tmp_path / "damaged" / name
            content = bytearray(file.read_bytes())
            content[random.integers(len(content))] ^= 0x11
            file.write_bytes(content)
            with pytest.raises(ValueError, match=r"damaged|missing|instead of|does not list") as noticed:
                read_everything(tmp_path / "damaged")
            assert str(tmp_path / "damaged") in str(noticed.value)
            if name != "index.json":
                assert name in str(noticed.value) and "run the eaglelab cache command" in str(noticed.value)
            shutil.rmtree(tmp_path / "damaged")


def test_a_truncated_or_missing_file_is_noticed_on_opening(store):
    opened = store()
    for name in files_of(opened.path):
        file = opened.path / name
        content = file.read_bytes()
        file.write_bytes(content[: -2 if name == "index.json" else -1])
        with pytest.raises(ValueError, match=name if name != "index.json" else "damaged"):
            FeatureStore(opened.path)
        file.unlink()
        with pytest.raises(ValueError, match=r"unfinished|no feature store|is missing"):
            FeatureStore(opened.path)
        file.write_bytes(content)
    read_everything(opened.path)


def test_a_shard_is_checked_before_its_first_use_and_not_before(store):
    opened = store()
    rows = opened.rows("train")
    last = opened.shards("train")[-1]
    file = opened.path / last.file
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert rows[0].features
    with pytest.raises(ValueError, match=last.file):
        rows[len(rows) - 1]


def test_a_newer_format_is_refused(store):
    opened = store()
    plan = json.loads((opened.path / "store.json").read_text())
    with pytest.raises(ValueError, match="has format 2, this eaglelab reads 1"):
        type(opened.plan).from_json(json.dumps(plan | {"format": 2}), "store.json")
    with pytest.raises(ValueError, match=r"no plan of a feature store \(TypeError"):
        type(opened.plan).from_json(json.dumps(plan | {"unknown": 1}), "store.json")


# ---- data settings -----------------------------------------------------------------------------------------------


def settings(**changes):
    return dict.fromkeys(SETTINGS) | {"path": None, "val_path": None, "batch_size": 2, "num_workers": 0} | changes


def test_data_settings_are_taken_from_the_store_or_must_agree(store):
    opened = store()
    for agreed in ({}, {"max_length": 24, "packing": True}):
        data = StoreDataModule(opened, supervise="advanced", seed=0, settings=settings(**agreed))
        data.setup()
        assert data.padded_length == 24 and len(data.train_rows) == 6 and len(data.val_rows) == 2
        assert data.report == prepared().report


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_length": 48}, r"data\.max_length=48 but .* was cached with 24"),
        ({"limit": 5}, r"data\.limit=5 but .* was cached with None"),
        ({"path": "chats.jsonl"}, r"data\.path=chats.jsonl: the rows come from"),
        ({"batch_size": 0}, "batch_size=0 makes no batch"),
    ],
)
def test_other_data_settings_are_refused(store, changes, named):
    with pytest.raises(ValueError, match=named):
        StoreDataModule(store(), supervise="advanced", seed=0, settings=settings(**changes))


def test_another_row_rule_is_refused(store):
    with pytest.raises(ValueError, match=r"variant\.supervise=source but .* was cached with advanced"):
        StoreDataModule(store(), supervise="source", seed=0, settings=settings())


# ---- verification ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"dtype": name} for name in ("float32", "bfloat16", "float8", "int8", "int4")]
    + [{"dtype": "int8", "top_k": 6}, {"taps": ("final",)}],
    ids=str,
)
def test_a_store_agrees_with_its_target(store, deep_target, options):
    result = verify(store(**options), deep_target, rows=100, show_progress=False)
    assert result.rows == 8 and result.worst <= 1


@pytest.mark.parametrize("options", [{}, {"dtype": "int4"}, {"dtype": "int8", "top_k": 6}], ids=str)
def test_features_of_other_tokens_do_not_verify(store, writer, deep_target, tmp_path, options):
    """A store that is whole in itself, of other tokens than its rows say."""
    store(**options)
    other = prepared()
    other.train_rows = packed_rows(((9, 7), (24,), (5, 12), (20,), (6,), (11, 13)), seed=9)
    writer(tmp_path / "other", data=other, **options).write(show_progress=False)
    shutil.copy(tmp_path / "store" / "train.rows.safetensors", tmp_path / "other")
    (tmp_path / "other" / "index.json").unlink()
    shutil.copy(tmp_path / "store" / "store.json", tmp_path / "other")
    writer(tmp_path / "other", **options)._finish()
    with pytest.raises(ValueError, match=r"row \d of train differs from the target"):
        verify(FeatureStore(tmp_path / "other"), deep_target, rows=100, show_progress=False)


def test_a_store_of_another_target_does_not_verify(store):
    with pytest.raises(ManifestMismatch):
        verify(store(), tiny_target(seed=1, num_hidden_layers=8), show_progress=False)
