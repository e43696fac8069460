"""What a cell's key depends on, and what it does not."""

import dataclasses

import pytest

import eaglelab
from eaglelab.comparison.cells import Cell, CellStore, Run, grid
from eaglelab.data.conversations import Conversation
from eaglelab.decoding import Sampling
from eaglelab.evaluation import Suite
from eaglelab.target import FeatureManifest
from eaglelab.target.fingerprint import TargetFingerprint
from eaglelab.training import RunFolder


def suite(*questions):
    return Suite("mine", tuple(Conversation(q, ({"role": "user", "content": q},), category="c") for q in questions))


@pytest.fixture
def cell():
    target = TargetFingerprint("c", "w", "t", source="here")
    manifest = FeatureManifest(target, taps=("final",), tap_norm="post", variant="eagle", software={"torch": "1"})
    return Cell(Run("a", 0, RunFolder("runs/a"), manifest, "weights"), suite("one", "two"), "chain", 0.0, 1)


def changed(cell, **manifest):
    return dataclasses.replace(
        cell, run=dataclasses.replace(cell.run, manifest=dataclasses.replace(cell.run.manifest, **manifest))
    )


def digest(cell, plan) -> str:
    return cell.key(plan).rsplit("-", 1)[1]


def test_everything_that_decides_the_figures_is_in_the_key(cell, plan, monkeypatch):
    asked = plan(trees={"chain": {"name": "chain", "depth": 2}, "deep": {"name": "chain", "depth": 3}})
    base = digest(cell, asked)
    cells = [
        dataclasses.replace(cell, run=dataclasses.replace(cell.run, weights="others")),
        changed(cell, switches={"noise": "none"}),
        changed(cell, target=TargetFingerprint("c", "other", "t", source="here")),
        dataclasses.replace(cell, suite=suite("one")),
        dataclasses.replace(cell, suite=suite("two", "one")),
        dataclasses.replace(cell, tree="deep"),
        dataclasses.replace(cell, temperature=1.0),
        dataclasses.replace(cell, batch=2),
    ]
    plans = [
        dataclasses.replace(asked, max_new_tokens=7),
        dataclasses.replace(asked, turns="first"),
        dataclasses.replace(asked, sampling=Sampling(seed=1)),
        dataclasses.replace(asked, dtype="bfloat16"),
    ]
    digests = [base, *(digest(one, asked) for one in cells), *(digest(cell, one) for one in plans)]
    monkeypatch.setattr(eaglelab, "__version__", "other")
    digests.append(digest(cell, asked))
    assert len(set(digests)) == len(digests)


def test_names_places_and_versions_of_libraries_are_not(cell, plan):
    asked = plan(trees={"chain": {"name": "chain", "depth": 2}, "same": {"name": "chain", "depth": 2}})
    others = [
        changed(cell, software={"torch": "2"}),
        dataclasses.replace(cell, tree="same"),
        dataclasses.replace(cell, run=dataclasses.replace(cell.run, name="b", seed=3, folder=RunFolder("elsewhere"))),
        dataclasses.replace(cell, suite=dataclasses.replace(cell.suite, name="yours")),
    ]
    assert {digest(one, asked) for one in others} == {digest(cell, asked)}


def test_runs_are_innermost_in_the_grid(cell, plan):
    runs = [cell.run, dataclasses.replace(cell.run, name="b")]
    cells = grid(plan(batches=[1, 2], temperatures=[0.0, 1.0]), runs, [cell.suite])
    assert [one.run.name for one in cells] == ["a", "b"] * 4
    assert [(one.temperature, one.batch) for one in cells][::2] == [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)]


def test_a_damaged_cell_is_named(cell, plan):
    store = CellStore(plan())
    store.folder(cell).mkdir(parents=True)
    (store.folder(cell) / "cell.json").write_text("{")
    with pytest.raises(ValueError, match=r"cell.json is damaged .*remove its folder"):
        store.read(cell)
