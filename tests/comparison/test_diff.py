"""What separates runs, from what their folders say."""

import json
import shutil

import pytest

from eaglelab.cli.compose import compose_training
from eaglelab.comparison import compare, diff_table, differences
from eaglelab.comparison.diff import merged_seeds


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny):
    """EAGLE twice with one seed and once with another, and EAGLE with three switches and settings changed."""
    from eaglelab.comparison import Budget, Plan, recipes_for
    from eaglelab.decoding import Sampling
    from tests.comparison.conftest import settings

    out = tmp_path_factory.mktemp("diff")
    recipes = {
        "same": ["variant=eagle"],
        "other": ["variant=eagle", "variant.noise=none", "data.limit=30", "optim.lr=1e-3"],
    }
    cells = {"suites": ["qa"], "limit": 1, "turns": "all", "max_new_tokens": 2, "trees": {"none": {"name": "none"}}}
    plan = Plan(
        out=out,
        recipes=recipes_for(["eagle", "same", "other"], recipes),
        given={},
        train=settings(tiny),
        budget=Budget("steps", 2),
        seeds=[0, 1],
        temperatures=[0.0],
        batches=[1],
        sampling=Sampling(),
        resamples=100,
        **cells,
    )
    results = compare(plan, compose_training)
    return {path.name: path for path in (out / "runs").iterdir()}, results


def fields(found):
    return {(one.section, one.field): one.values for one in found}


def test_equal_runs_say_so(runs):
    folders, _ = runs
    found = differences({name: folders[name] for name in ("eagle-seed0", "same-seed0")})
    assert found == []
    assert diff_table(found).startswith("no difference")


def test_every_difference_is_named_in_its_section(runs):
    folders, _ = runs
    found = fields(differences({name: folders[name] for name in ("eagle-seed0", "other-seed0")}))
    assert found["contract", "noise"] == {"eagle-seed0": "paper_uniform", "other-seed0": "none"}
    assert found["data", "data.limit"] == {"eagle-seed0": 40, "other-seed0": 30}
    assert found["data", "train.read"] == {"eagle-seed0": 40, "other-seed0": 30}
    assert found["recipe", "optim.lr"] == {"eagle-seed0": 0.006, "other-seed0": 0.001}
    sections = {section for section, _ in found}
    assert sections == {"contract", "data", "recipe", "budget"}
    assert {field for section, field in found if section == "budget"} == {"supervised_rows"}
    assert {field for section, field in found if section == "contract"} == {"noise"}


def test_seeds_are_told_and_folded_where_they_agree(runs):
    folders, results = runs
    found = fields(differences({name: folders[name] for name in ("eagle-seed0", "eagle-seed1")}))
    assert found["recipe", "seed"] == {"eagle-seed0": 0, "eagle-seed1": 1}
    labels = {name: folders[name] for name in ("eagle-seed0", "eagle-seed1", "other-seed0", "other-seed1")}
    folded = fields(merged_seeds(differences(labels), {label: label.split("-")[0] for label in labels}))
    assert folded["contract", "noise"] == {"eagle": "paper_uniform", "other": "none"}
    assert set(folded["recipe", "seed"]) == set(labels)
    printed = {(one["section"], one["field"]) for one in results["diff"]}
    assert ("contract", "noise") in printed


def test_versions_targets_and_missing_fields_are_differences(runs, tmp_path):
    folders, _ = runs
    changed = shutil.copytree(folders["eagle-seed0"], tmp_path / "changed")
    manifest = json.loads((changed / "manifest.json").read_text())
    manifest["software"]["torch"] = "1.0"
    manifest["target"]["weights"] = "0" * 64
    (changed / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(changed / ".hydra")
    found = fields(differences({"here": folders["eagle-seed0"], "there": changed}))
    assert found["versions", "torch"]["there"] == "1.0"
    assert found["target", "weights"]["there"] == "0" * 64
    assert found["recipe", "optim.lr"] == {"here": 0.006, "there": "-"}
    table = diff_table(differences({"here": folders["eagle-seed0"], "there": changed}))
    assert "there 000000000000" in table
    assert max(len(line) for line in table.splitlines()) <= 120


def test_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        differences({"a": tmp_path / "nope"})
