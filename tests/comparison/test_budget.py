"""What a budget buys, and schedules stretched to it."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from eaglelab.cli.compare import plan_of
from eaglelab.cli.compose import compose_training
from eaglelab.cli.config import config_dir
from eaglelab.comparison import budget as budget_module
from eaglelab.comparison.budget import scaled
from eaglelab.comparison.trainings import Trainings
from eaglelab.variants.optim import OptimConfig
from tests.comparison.conftest import EAGLE3

STUDY = Path(__file__).parents[2] / "experiments" / "three_variants" / "plan.json"


def resolved(plan):
    trainings = Trainings(plan, compose_training)
    return trainings.resolve(trainings.target(), plan.names)


@pytest.mark.parametrize("unit", ["rows", "flops"])
def test_every_recipe_gets_the_same_amount(plan, unit):
    """To half a step, whatever a step holds: EAGLE-3's costs most, a smaller batch has fewer rows."""
    recipes = {"small": ["variant=eagle", "data.batch_size=1"], "eagle3": EAGLE3}
    value = {"rows": 30_000, "flops": 2e11}[unit]
    spent = resolved(plan(variants=["eagle", "small", "hass", "eagle3"], recipes=recipes, budget=(unit, value)))
    for one in spent.values():
        assert one.steps * getattr(one, unit) == pytest.approx(value, abs=0.51 * getattr(one, unit))
        assert one.seconds is None
    assert spent["small"].rows == pytest.approx(spent["eagle"].rows / 2, rel=0.1)
    assert spent["eagle3"].flops > spent["hass"].flops > spent["eagle"].flops


def test_rows_of_a_step_are_those_of_a_training(plan):
    from eaglelab.comparison import compare

    asked = plan(variants=["eagle"], budget=("steps", 18))  # two epochs of nine batches
    (run,) = compare(asked, compose_training)["runs"]
    assert run["supervised_rows"] == pytest.approx(18 * resolved(asked)["eagle"].rows, rel=1e-9)


def test_seconds_are_measured_in_turns_and_the_two_kinds_of_hass_step_apart(plan, monkeypatch):
    """A clock that is told how long each configuration takes: one pass 2 s, three passes 6 s, EAGLE 3 s."""
    order = []

    def round_of(self):
        passes = self._module.num_passes
        kind = f"{self._module.variant}{passes}"
        order.append(kind)
        self.seconds += [{"eagle1": 3.0, "hass1": 2.0, "hass3": 6.0}[kind] + (len(order) < 4) * 5]  # a slow first round

    monkeypatch.setattr(budget_module._Timer, "round", round_of)
    spent = resolved(plan(budget=("seconds", 60)))
    assert order == ["eagle1", "hass1", "hass3"] * 3
    assert spent["eagle"].seconds == 3
    assert spent["hass"].seconds == pytest.approx(0.75 * 2 + 0.25 * 6)
    assert (spent["eagle"].steps, spent["hass"].steps) == (20, 20)


def test_a_real_calibration_times_steps(plan):
    (one,) = resolved(plan(variants=["hass"], budget=("seconds", 5))).values()
    assert one.seconds > 0
    assert one.steps == round(5 / one.seconds)


def test_a_schedule_keeps_its_shape():
    recipe = compose_training(["variant=eagle"], "/nowhere")  # 1240 steps, warm-up of 20
    half = scaled(recipe, 620)
    assert half.optim.warmup_steps == 10
    assert (half.trainer.max_steps, half.trainer.val_check_interval) == (620, 124)
    # the recipe validates every 124 steps: no more often, at most ten times, and at the end of a shorter one
    assert [scaled(recipe, steps).trainer.val_check_interval for steps in (39, 2480)] == [39, 248]
    laws = [OptimConfig(**config.optim) for config in (recipe, half)]
    for share in (0.25, 0.5, 0.75):
        long, short = (law.lr_scale(int(share * n), n) for law, n in zip(laws, (1240, 620)))
        assert short == pytest.approx(long, abs=1e-3)
    pinned = compose_training(["experiment=eagle_pinned", "data.path=x", "target.source=y", "target=hf"], "/nowhere")
    tenth = scaled(pinned, 80_000)
    assert (tenth.optim.warmup_steps, tenth.optim.total_steps) == (200, 80_000)
    accumulated = compose_training(["variant=eagle", "optim.accumulate=4", "optim.warmup_steps=0.1"], "/nowhere")
    assert scaled(accumulated, 1000).trainer.val_check_interval == 400  # in micro-batches
    assert scaled(accumulated, 100).optim.warmup_steps == 0.1


def test_the_three_variants_study_is_one_command(tmp_path):
    """Names, order, steps, recipes, prompts and decoding of its plan; the warm-up is the study's."""
    study = json.loads(STUDY.read_text())
    with initialize_config_dir(config_dir=config_dir(), version_base="1.3"):
        config = compose(config_name="compare", overrides=["comparison=three_variants", f"out={tmp_path}"])
    plan = plan_of(config)
    assert list(plan.recipes) == list(study["runs"])
    assert (plan.limit, plan.max_new_tokens, list(plan.seeds)) == (study["prompts"], 256, [0, 1])
    trainings = Trainings(plan, compose_training)
    for name, run in study["runs"].items():
        assert plan.budget.of(name) == run["steps"]
        overrides = [one.format(runs=tmp_path / "runs", seed=1) for one in run["overrides"]]
        theirs = compose_training([*overrides, "seed=1"], tmp_path / "runs" / f"{name}-seed1")
        ours = trainings.compose(name, 1)
        assert [one.replace("-seed1", "-1") for one in (str(ours.init_from),)] == [str(theirs.init_from)]
        assert int(OptimConfig(**scaled(ours, run["steps"]).optim).warmup_steps * run["steps"]) in (
            20,
            20 * run["steps"],
        )
        for group in ("variant", "data", "target"):
            assert ours[group] == theirs[group]
        assert ours.optim.lr == theirs.optim.lr


def test_the_papers_tasks_are_one_command_with_whole_recipes(tmp_path):
    with initialize_config_dir(config_dir=config_dir(), version_base="1.3"):
        config = compose(config_name="compare", overrides=["comparison=paper_tasks", f"out={tmp_path}"])
    plan = plan_of(config)
    assert set(plan.suites) == {"mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa"}
    trainings = Trainings(plan, compose_training)
    assert {name: plan.budget.of(name) for name in plan.recipes} == {
        name: trainings.compose(name, 0).trainer.max_steps for name in ("eagle", "hass", "eagle3")
    }
    assert trainings.compose("hass", 2).seed == 2 and len(plan.seeds) == 3
