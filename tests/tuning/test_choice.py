"""Costs and replays by arithmetic: interpolation, which trees are considered, what a prediction adds up to."""

import pytest
import torch

from eaglelab.decoding import Chain, DynamicTree, StaticTree, make_tree
from eaglelab.tuning import Costs, Grid, Growth, Recording, Replay, Shape, choose, predict
from eaglelab.tuning.costs import between, row_grid

COSTS = Costs(verify={1: 10.0, 3: 14.0, 5: 30.0}, level={1: 2.0, 3: 4.0}, root=1.0, plain=0.5, rest=0.25)


def test_between_known_sizes():
    known = {1: 10.0, 3: 14.0, 5: 30.0}
    assert [between(known, size) for size in (1, 2, 3, 4, 5)] == [10, 12, 14, 22, 30]
    assert between(known, 6) == 38
    assert between({2: 7.0}, 9) == 7


def test_the_rows_that_are_timed():
    assert row_grid(60) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60]
    assert row_grid(2) == [1, 2]
    assert row_grid(16) == [1, 2, 3, 4, 6, 8, 12, 16]


def test_a_round_costs_its_rows_its_levels_and_the_rest():
    assert COSTS.round(rows=4, forwarded=(3, 2)) == 1 + 4 + 3 + 22 + 0.25
    assert COSTS.round(rows=2, forwarded=()) == 1 + 12 + 0.25
    assert COSTS.plain_round() == 10.5


def growth(tokens, values):
    """Width 1 down to depth 2: the root's child, and its child."""
    return {1: Growth(torch.tensor([0, 1]), torch.tensor(tokens), torch.tensor(values).log())}


def recording():
    """Text 5 6 7 8 9: with 5 as root both drafts are right, with 6 the first, with 8 nothing is drafted."""
    return Recording(
        [5, 6, 7, 8, 9],
        [growth([6, 7], [0.9, 0.5]), growth([7, 1], [0.8, 0.3]), growth([2, 9], [0.6, 0.1]), None],
    )


def test_a_prediction_by_hand():
    replay = Replay([recording()])
    assert replay.places == 3 and replay.widths == [1] and replay.depth == 2
    deep = predict(replay, COSTS, Shape(1, 2, 2))  # root 5 takes 6 and 7, publishes 8; then a plain round
    seconds = (1 + 2 + 14 + 0.25) + 10.5
    assert (deep.tau, deep.rows, deep.levels) == (2, 2, 0.5)
    assert deep.tokens_per_s == pytest.approx(4 / seconds)
    assert deep.speedup == pytest.approx(4 * 10.5 / seconds)
    shallow = predict(replay, COSTS, Shape(1, 1, 1))  # root 5 takes 6, publishes 7; root 7 takes nothing, publishes 8
    seconds = 2 * (1 + 12 + 0.25) + 10.5
    assert shallow.tau == pytest.approx(1 + 1 / 3)
    assert shallow.tokens_per_s == pytest.approx(4 / seconds)
    floored = predict(replay, COSTS, Shape(1, 2, 2, floor=0.95))  # the best node is verified, none is forwarded
    assert (floored.tau, floored.rows, floored.levels) == (shallow.tau, 5 / 3, 0)


def test_the_fastest_comes_first_and_costs_decide():
    replay, grid = Replay([recording()]), Grid((1, 4), 3, (1, 2, 3), (0.0,))
    found = choose(replay, COSTS, grid)
    assert {one.shape for one in found} == {Shape(1, 1, 1), Shape(1, 2, 2)}, "what was not recorded is left out"
    assert found[0].shape == Shape(1, 2, 2)
    dear = Costs(verify={1: 10.0, 2: 10.5, 3: 100.0}, level={1: 2.0}, root=1.0)
    assert choose(replay, dear, grid)[0].shape == Shape(1, 1, 1)
    speeds = [one.tokens_per_s for one in found]
    assert speeds == sorted(speeds, reverse=True)


def test_each_tree_is_considered_once():
    shapes = list(Grid((1, 2), 3, (2, 100), (0.0, 0.1)).shapes())
    assert len(shapes) == len(set(shapes))
    assert {(s.width, s.depth, s.budget) for s in shapes} == {
        (1, 1, 1), (1, 2, 2), (1, 3, 3),
        (2, 1, 2), (2, 2, 2), (2, 2, 6), (2, 3, 10),
    }  # fmt: skip
    for shape in shapes:
        tree = shape.policy()
        assert (tree.max_depth, tree.max_nodes) == (shape.depth, shape.budget)


@pytest.mark.parametrize(
    "tree", [Chain(3), DynamicTree(), DynamicTree(2, 9, 4), DynamicTree(3, 2, 5, 0.05), DynamicTree(1, 4, 4, 0.1)]
)
def test_overrides_make_the_same_tree(tree):
    shape = Shape.of(tree)
    settings = dict(word.removeprefix("tree.").split("=") for word in shape.overrides.split() if "tree=" not in word)
    numbers = {name: float(value) if name == "floor" else int(value) for name, value in settings.items()}
    again = make_tree(shape.overrides.split()[0].removeprefix("tree="), **numbers)
    assert Shape.of(again) == shape == Shape.of(shape.policy())
    assert again.max_nodes == tree.max_nodes and again.max_depth == tree.max_depth


def test_fixed_trees_have_no_prediction():
    assert Shape.of(StaticTree()) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"widths": ()}, "widths="),
        ({"widths": (2, 0)}, "widths="),
        ({"budgets": (1.5,)}, "budgets="),
        ({"depth": 0}, "depth="),
        ({"floors": (1.0,)}, "floors="),
        ({"floors": ()}, "floors="),
    ],
)
def test_a_grid_is_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        Grid(**wrong)


def test_nothing_drafted_is_an_error():
    with pytest.raises(ValueError, match="nothing was drafted"):
        Replay([Recording([1, 2], [None])])
