"""A comparison from nothing to its results, cut short and gone on with, on a tiny target."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eaglelab.cli.compose import compose_training
from eaglelab.comparison import Interrupted, compare, comparison_table
from eaglelab.comparison import cells as cells_module
from eaglelab.comparison.trainings import Trainings
from eaglelab.training import RunFolder

ROOT = Path(__file__).parents[2]
MEASURED = ("seconds", "tokens_per_s", "speedup", "decode_s", "draft_cost", "verify_cost", "other_cost", "memory")


def timeless(value):
    """Results without what a clock or the memory said."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not any(word in k for word in MEASURED)}
    if isinstance(value, list):
        return [timeless(one) for one in value if not (isinstance(one, dict) and one.get("measure") == "speedup")]
    return value


def stamps(folder: Path) -> dict[str, int]:
    kept = [*folder.glob("runs/*/checkpoints/*"), *folder.glob("cells/*/*")]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in kept}


def test_a_comparison_says_what_it_did_and_a_second_call_does_nothing_again(plan):
    asked = plan(batches=[2], temperatures=[0.0, 1.0], seeds=[0, 1])
    results = compare(asked, compose_training)
    assert len(results["rows"]) == 2 * 2 * 2
    assert [(run["name"], run["seed"], run["steps"]) for run in results["runs"]] == [
        ("eagle", 0, 4),
        ("hass", 0, 4),
        ("eagle", 1, 4),
        ("hass", 1, 4),
    ]
    for row in results["rows"]:
        assert row["identical"] == row["answers"] == 3
        assert row["tau_low"] <= row["tau"] <= row["tau_high"]
        assert row["train_steps"] == 4
        assert row["train_simulated_tau"] >= 1
    (one,) = {tuple(row["seeds"]) for row in results["summary"]}
    assert one == (0, 1)
    assert {(c["one"], c["other"], c["measure"]) for c in results["contrasts"]} == {
        ("hass", "eagle", "tau"),
        ("hass", "eagle", "speedup"),
    }
    assert {c["tests"] for c in results["contrasts"]} == {2}  # one suite, one batch: two temperatures
    assert "hass" in comparison_table(results)
    recorded = json.loads((asked.out / "comparison.json").read_text())
    assert recorded["budget"] == {"unit": "steps", "value": 4}
    assert set(recorded["runs"]) == {"eagle-seed0", "hass-seed0", "eagle-seed1", "hass-seed1"}
    assert recorded["runs"]["hass-seed1"]["steps"] == 4

    before = stamps(asked.out)
    again = compare(asked, compose_training)
    assert stamps(asked.out) == before
    assert again == results


def test_acceptance_and_totals_follow_from_the_raw_records_alone(plan):
    asked = plan(
        trees={"static": {"name": "static"}, "dynamic": {"name": "dynamic", "width": 3, "depth": 3, "budget": 6}}
    )
    compare(asked, compose_training)
    done = subprocess.run(
        [sys.executable, "experiments/compare_check.py", str(asked.out)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 cells, 0 differences" in done.stdout
    results = json.loads((asked.out / "results.json").read_text())
    results["rows"][0]["tau"] += 0.01
    (asked.out / "results.json").write_text(json.dumps(results))
    done = subprocess.run(
        [sys.executable, "experiments/compare_check.py", str(asked.out)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1


def test_stopped_anywhere_and_started_again_gives_the_numbers_of_one_go(plan, tmp_path, monkeypatch):
    """After the first training, in the middle of the second one, and in the middle of a cell."""
    whole = compare(plan(out=tmp_path / "whole"), compose_training)

    asked = plan()
    train, measure = Trainings.run, cells_module.evaluate

    def stop_before_hass(self, name, seed, spent):
        if name == "hass":
            raise Interrupted
        train(self, name, seed, spent)

    monkeypatch.setattr(Trainings, "run", stop_before_hass)
    with pytest.raises(KeyboardInterrupt):
        compare(asked, compose_training)
    assert not (asked.out / "results.json").exists()
    monkeypatch.setattr(Trainings, "run", train)

    half = Trainings(asked, compose_training)  # two of four steps, as a stop in between would leave them
    full = dataclasses.replace(asked, budget=asked.budget)
    _train_partly(half, full, steps=2)

    asked_for = []

    def stop_in_a_cell(*arguments, **settings):
        result = measure(*arguments, **settings)
        asked_for.append(result)
        result.partial = len(asked_for) == 4  # the second cell's measurement, after its warm-up
        return result

    monkeypatch.setattr(cells_module, "evaluate", stop_in_a_cell)
    with pytest.raises(KeyboardInterrupt):
        compare(asked, compose_training)
    assert len(list(asked.out.glob("cells/*/cell.json"))) == 1
    monkeypatch.setattr(cells_module, "evaluate", measure)

    results = compare(asked, compose_training)
    assert timeless(results) == timeless(whole) | {"runs": timeless(results)["runs"]}
    for name in ("eagle-seed0", "hass-seed0"):
        ours, theirs = (
            RunFolder(out / "runs" / name).load_network().state_dict() for out in (asked.out, tmp_path / "whole")
        )
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert not (asked.out / "unfinished").exists()


def _train_partly(trainings: Trainings, plan, steps: int) -> None:
    """Leave a run folder whose training was interrupted after ``steps`` steps of the plan's schedule."""
    from eaglelab.comparison.budget import scaled
    from eaglelab.training import train

    folder = trainings.folder("hass", 0)
    config = scaled(trainings.compose("hass", 0), 4)
    config.callbacks.stop = {"_target_": "tests.comparison.stopping.StopAfter", "steps": steps}
    train(config, folder)


def test_more_of_the_same_adds_cells_and_something_else_is_refused(plan):
    asked = plan(variants=["eagle"])
    compare(asked, compose_training)
    before = stamps(asked.out)
    more = dataclasses.replace(asked, trees={**asked.trees, "wide": {"name": "static"}})
    results = compare(more, compose_training)
    assert [row["tree"] for row in results["rows"]] == ["chain", "wide"]
    assert before.items() <= stamps(asked.out).items()

    with pytest.raises(ValueError, match=r"drafter eagle with budget .*'value': 4.*asked is .*'value': 5"):
        compare(plan(variants=["eagle"], budget=("steps", 5)), compose_training)
    other = plan(variants=["eagle"], recipes={"eagle": ["variant=eagle", "variant.noise=none"]})
    with pytest.raises(ValueError, match=r"drafter eagle with recipe .*variant.noise=none"):
        compare(other, compose_training)
    assert before.items() <= stamps(asked.out).items()


def test_given_runs_take_part_with_their_seeds(plan, tmp_path):
    trained = plan(variants=["eagle"], out=tmp_path / "first", seeds=[0, 3])
    compare(trained, compose_training)
    folders = [str(trained.out / "runs" / f"eagle-seed{seed}") for seed in (0, 3)]
    asked = plan(variants=[], given={"old": folders, "one": folders[:1]})
    results = compare(asked, compose_training)
    assert [(run["name"], run["seed"]) for run in results["runs"]] == [("old", 0), ("old", 3), ("one", 0)]
    rows = {(row["name"], row["seed"]): row["tau"] for row in results["rows"]}
    assert rows["old", 0] == rows["one", 0]
    assert (asked.out / "runs" / "old-seed3" / "manifest.json").is_file()
    assert not (asked.out / "runs" / "old-seed3" / "checkpoints").exists()
    again = compare(asked, compose_training)
    assert again == results


def test_questions_longer_than_the_context_are_skipped_and_told(plan, tmp_path):
    path = tmp_path / "mixed.jsonl"
    turns = ["long " * 600, "What is 2 + 2?", "What is 3 + 3?"]
    path.write_text("\n".join(json.dumps({"question_id": n, "turns": [turn]}) for n, turn in enumerate(turns)))
    asked = plan(variants=["eagle"], suites=[str(path)])
    results = compare(asked, compose_training)
    (row,) = results["rows"]
    assert (row["suite"], row["prompts"], row["skipped"], row["answers"]) == ("mixed", 3, 1, 2)
    assert "mixed: 1 questions are longer" in " ".join(results["notes"])
    path.write_text(json.dumps({"question_id": 0, "turns": turns[:1]}))
    with pytest.raises(ValueError, match="suite mixed: no prompt left room"):
        compare(asked, compose_training)


def test_a_folder_has_one_process_at_a_time(plan):
    from eaglelab.comparison.compare import locked

    asked = plan()
    with locked(asked.out.resolve()), pytest.raises(ValueError, match="another process works in"):
        compare(asked, compose_training)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "seeds=[] leaves nothing to do"),
        ({"batches": [1, 1]}, "batches: 1 is listed twice"),
        ({"batches": [0]}, "decode at least one prompt"),
        ({"batches": [1.5]}, "batches: 1.5 is no whole number"),
        ({"seeds": ["a"]}, "seeds: 'a' is no whole number"),
        ({"seeds": [-1]}, "a seed is 0 or more"),
        ({"budget": ("steps", "many")}, "budget.value: 'many' is no number"),
        ({"limit": "ten"}, "limit: 'ten' is no whole number"),
        ({"limit": 0}, "limit=0 keeps no question"),
        ({"turns": "both"}, "choose first or all"),
        ({"temperatures": [-1.0]}, "temperature=-1"),
        ({"trees": {"chain": {"name": "chain", "deepness": 3}}}, "tree=chain"),
        ({"suites": ["gsm9k"]}, "no suite and no file is called 'gsm9k'"),
        ({"budget": ("hours", 3)}, "budget.unit='hours'"),
        ({"budget": ("steps", 0)}, "budget.value=0 trains nothing"),
        ({"budget": ("steps", {"eagle": 3})}, "budget.value has no entry for hass"),
        ({"budget": ("rows", 1)}, "buys no optimizer step of eagle"),
        ({"variants": []}, "nothing to compare"),
        ({"variants": ["medusa"]}, "variants: 'medusa' is not one of eagle, hass, eagle3"),
        ({"recipes": {"eagle": ["variant=eagle", "stages=[{}]"]}}, "eagle has stages"),
        ({"recipes": {"eagle": ["variant=eagle", "trainer.devices=2"]}}, "trains on several processes"),
        ({"recipes": {"eagle": ["variant=eagle", "target.source=bundled"]}}, "a comparison has one target"),
        ({"variants": [], "given": {"a": ["/nope"]}}, "run=/nope does not exist"),
        ({"given": {"a b": ["/nope"]}}, "'a b' is no name"),
    ],
)
def test_bad_plans_end_in_one_message(changes, message, plan):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        compare(plan(**changes), compose_training)
    assert message in str(error.value)
