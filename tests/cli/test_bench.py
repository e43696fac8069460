"""`eaglelab bench` on a shape of seconds."""

import dataclasses
import json
import os

import pytest
import torch

from eaglelab.kernels import selection
from eaglelab.target.shape import TargetShape
from eaglelab.training.cost import Conditions, Shape, in_fresh_process, measure, random_module
from eaglelab.training.flops import Load, step_flops
from eaglelab.training.versus import exponent, race, race_table
from eaglelab.variants import VARIANTS
from tests.cli.conftest import run

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 7, "num_heads": 2, "vocab_size": 64}


SMALL = [*(f"shape.{name}={value}" for name, value in TINY.items()), "shape.batch=1", "shape.length=64", "steps=2"]


@pytest.mark.parametrize("variants", [["eagle3"], pytest.param(["eagle", "hass", "eagle3"], marks=pytest.mark.slow)])
def test_bench_prints_and_saves_variants(variants, tmp_path):
    asked = f"variants=[{','.join(variants)}]"
    done = run("bench", *SMALL, asked, "literal=false", "shipped=false", "out=cost.json", cwd=tmp_path)
    costs = json.loads((tmp_path / "cost.json").read_text())["split"]
    assert [cost["variant"] for cost in costs] == variants
    for cost in costs:
        assert cost["variant"] in done.stdout
        assert sum(cost["split"].values()) == pytest.approx(1)
        assert min(cost["peak_mib"], cost["resident_mib"]) > 0
        assert cost["seconds_low"] <= cost["seconds"] <= cost["seconds_high"]
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


@pytest.mark.slow
def test_bench_beside_the_literal_implementation_and_over_length(tmp_path):
    """What is printed is what is saved; ratios are taken repetition by repetition."""
    settings = [
        "variants=eagle3",
        "split=false",
        "shipped=false",
        "growth=length",
        "points.length=[32,64,128]",
        "out=found.json",
    ]
    done = run("bench", *SMALL, "settings.eagle3.draft_vocab_size=40", *settings, cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"literal", "growth"}
    (one,), (curve,) = found["literal"], found["growth"]
    assert one["settings"] == {"draft_vocab_size": 40}
    pairs = zip(one["seconds"]["shipped"]["values"], one["seconds"]["literal"]["values"], strict=True)
    assert one["ratio"]["values"] == pytest.approx([ours / literal for ours, literal in pairs])
    assert len(one["ratio"]["values"]) == 2
    assert f"{one['ratio']['median']:.2f} (" in done.stdout
    assert 0 < one["flops"]["shipped"] < one["flops"]["literal"]
    assert one["flop_utilisation"]["shipped"] == pytest.approx(
        one["flops"]["shipped"] / one["seconds"]["shipped"]["median"] / one["matmul_flops"]
    )
    assert curve["points"] == [32, 64, 128]
    assert len(curve["seconds"]) == len(curve["peak_mib"]) == 3
    assert f"exponent {curve['exponent_mib']:.2f}" in done.stdout or f"{curve['exponent_mib']:.2f} (last" in done.stdout


@pytest.fixture
def in_this_process(monkeypatch):
    """Not in fresh ones, which take seconds to start."""
    monkeypatch.setattr("eaglelab.training.versus.in_fresh_process", lambda work, job, start=None: work(*job))


def test_shipped_steps_are_compared_in_one_process(tmp_path, in_this_process):
    """Ratios are taken repetition by repetition, over the first case; each draft vocabulary is a case."""
    both = "draft_vocab_sizes=[20,40]"
    settings = ["variants=[eagle,eagle3]", both, "split=false", "literal=false", "shape.answer=1", "out=found.json"]
    done = run("bench", *SMALL, *settings, cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"shipped"}
    (race,) = found["shipped"]
    names = ["eagle", "eagle3 20", "eagle3 40"]
    assert list(race["seconds"]) == list(race["ratio"]) == names
    for times, ratios in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")):
        for name in names:
            pairs = zip(race[times][name]["values"], race[times]["eagle"]["values"], strict=True)
            assert race[ratios][name]["values"] == pytest.approx([ours / eagle for ours, eagle in pairs])
            assert len(race[ratios][name]["values"]) == 2
            assert f"{race[ratios][name]['median']:.2f}x (" in done.stdout
    assert all(name in done.stdout for name in names)
    assert race["shape"]["answer"] == 1


@pytest.mark.parametrize("variant", ["eagle", "hass", "eagle3"])
def test_a_wide_step_needs_no_target(variant, in_this_process):
    """Heads that share keys, bfloat16 under float32 weights, random features; operations are those of `plan`, without
    the target's, and rates are divided by those of the same call."""
    shape = Shape(**TINY | {"num_heads": 4, "num_kv_heads": 2}, batch=1, length=64, answer=1)
    conditions = Conditions(precision="bf16-mixed", random_features=True)
    settings = {"draft_vocab_size": 40} if variant == "eagle3" else {}
    one = race({variant: (variant, settings)}, shape, repetitions=1, conditions=conditions)

    module = random_module(variant, shape, settings, conditions, lr=1e-3)
    target = module.target
    assert target.dtype == torch.bfloat16 and target.num_layers == 7 and not list(target.decoder.layers)
    assert {p.dtype for p in module.network.parameters()} == {torch.float32}
    assert (module.drafter_config.num_attention_heads, module.drafter_config.num_key_value_heads) == (4, 2)
    of_target = TargetShape.of_config(target.text_config)
    wanted = step_flops(of_target, module.drafter_config, module.contract, Load(1, 64), online=False)
    assert one.flops[variant] == pytest.approx(wanted.total, rel=0.01)

    seconds = one.seconds[variant].median
    assert one.tokens_per_s(variant) == pytest.approx(64 / seconds)
    told = json.loads(json.dumps(one.to_dict()))
    assert told["flop_utilisation"][variant] == pytest.approx(wanted.total / seconds / one.matmul_flops, rel=0.01)
    assert told["conditions"]["precision"] == "bf16-mixed"
    assert one.peak_mib[variant] >= 0 and one.held_mib[variant] > 0
    table = race_table(one)
    assert "in bfloat16" in table and "random features" in table and " over " not in table


def test_bench_kernels_prints_and_saves_every_case_and_says_why_no_kernel_ran(tmp_path):
    shapes = "{rows: 3, vocab_sizes: [11, 50], draft_vocab_sizes: 7, steps: 2, dtypes: [bf16, float32]}"
    attention = "{batch: 2, rows: 12, heads: 4, groups: 2, head_dim: 8, segments: 1, steps: [0, 1], dtypes: fp32}"
    settings = [f"attention={attention}", "repetitions=2", "out=found.json"]
    done = run("bench", "kernels", f"soft_cross_entropy={shapes}", *settings, cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["interrupted"]
    cases = {one["case"]: one for one in found["soft_cross_entropy"]}
    sizes = {"V 11, 1 step": (11, 1), "V 50, 1 step": (50, 1), "V 7, 2 steps": (7, 2)}
    assert set(cases) == {f"{dtype}, {size}" for dtype in ("bfloat16", "float32") for size in sizes}
    for name, one in cases.items():
        V, S = sizes[name.partition(", ")[2]]
        each = 2 if name.startswith("bfloat16") else 4
        assert one["least_bytes"] == 3 * S * V * each * 2 + 3 * V * 4  # logits, gradients, distributions
        assert list(one["implementations"]) == ["eager"]
        eager = one["implementations"]["eager"]
        assert len(eager["seconds"]["values"]) == 2 and eager["over_eager"]["values"] == [1, 1]
        bytes_per_s = one["least_bytes"] / eager["seconds"]["median"]
        assert eager["share_of_copy"] == pytest.approx(bytes_per_s / one["copy_bytes_per_s"])
        assert name in done.stdout
    assert (
        "the fused soft cross entropy is not usable here: it is not written for cpu and torch.bfloat16" in done.stdout
    )
    plain, own = found["attention"]
    assert (plain["setting"]["steps"], own["setting"]["steps"]) == (0, 1)
    assert list(plain["contestants"]) == ["blocks", "masked", "causal"] and list(own["contestants"]) == ["blocks"]
    for one in (plain, own):
        blocks = one["contestants"]["blocks"]
        assert len(blocks["seconds"]["values"]) == 2 and blocks["speedup"]["values"] == [1, 1]
        flops_per_s = one["flops"] / blocks["seconds"]["median"]
        assert blocks["share_of_matmul"] == pytest.approx(flops_per_s / one["matmul_flops_per_s"])
    assert "float32, 12 rows, 1 segment, 1 own key" in done.stdout


def test_bench_rounds_prints_and_saves_what_it_measured(tmp_path):
    settings = ["prompt_tokens=3", "rounds=2", "repetitions=1", "acceptance=2", "trees=[{name:chain,depth:2}]"]
    shape = ["shape.num_layers=7", "shape.hidden_size=32"]
    done = run("bench", "rounds", *settings, *shape, "out=found.json", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["setting"]["shape"] | {"num_layers": 7, "hidden_size": 32} == found["setting"]["shape"]
    assert found["accepted"] == [2, 2] and found["tau"] == 3
    (tree,) = found["trees"].values()
    assert tree["accepted_as_scripted"] and tree["text_of_plain_decoding"]
    assert f"{tree['speedup']['median']:.2f}x (" in done.stdout and "chain 2" in done.stdout


@pytest.mark.parametrize(("answer", "supervised"), [(0.5, 16), (1.0, 31), (0.25, 8), (1e-3, 1)])
def test_the_answer_is_the_last_share_of_a_conversation(answer, supervised):
    """Of 32 tokens; a row counts when the token behind it is in the answer, and the first token has none before it."""
    assert Shape(batch=1, length=32, answer=answer).make_batch().supervised == supervised


def test_an_exponent_is_the_slope_of_the_logarithms():
    assert exponent([2, 4, 8], [12.0, 48.0, 192.0]) == pytest.approx(2)
    assert exponent([1, 3, 7], [5.0, 5.0, 5.0]) == pytest.approx(0)


def test_a_measuring_process_that_is_killed_is_told():
    with pytest.raises(ValueError, match="use a smaller shape"):
        in_fresh_process(os._exit, (9,))


def test_bad_input_ends_in_one_message(tmp_path):
    for arguments, message in (
        (["variants=[egale]"], "variants='egale' is not one of"),
        (["steps=0"], "steps=0"),
        (["growth=depth"], "growth='depth'"),
        (["growth=steps", "variants=eagle"], "is no quantity of eagle"),
        (["split=false", "literal=false", "shipped=false"], "nothing is left to measure: leave split, shipped or"),
        (["device=cuda", "split=false"], "device=cuda: needs a GPU"),
        (["variants=hass", "+settings.hass.eagle_share=0.5", *SMALL], "passes=1 and top_weight=0"),
        (["settings.eagle=3"], "settings.eagle: 3 is no mapping of switches"),
        (["shape.answer=1.5"], "shape.answer=1.5 is a share"),
        (["growth=steps", "variants=hass", "points.steps=[4,5,6,7]"], "three points up to 5 for hass"),
    ):
        done = run("bench", *arguments, cwd=tmp_path, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_steps_are_measured_with_the_kernels_that_are_asked_for_and_counted_without(in_this_process, monkeypatch):
    """A kernel cannot tell its operations."""
    seen = []

    def passes(self, view, original=VARIANTS["eagle"].passes):
        seen.append(selection._choice)
        return original(self, view)

    monkeypatch.setattr(VARIANTS["eagle"], "passes", passes)
    for choice in ("auto", "torch"):
        seen.clear()
        race({"eagle": ("eagle", {})}, Shape(**TINY, length=64), repetitions=1, conditions=Conditions(kernels=choice))
        # warming up and two runs, the count, warming up and memory
        assert seen == [choice] * 3 + ["torch"] + [choice] * 2


def test_shapes_and_conditions_that_cannot_be_are_refused():
    for build, message in (
        (lambda: Conditions(precision="fp16"), "precision=fp16 is unknown: use 32-true or bf16-mixed"),
        (lambda: Conditions("tpu"), "device=tpu is unknown: use cpu or cuda"),
        (lambda: Conditions(kernels="triton"), "kernels=triton is unknown: use auto or torch"),
        (lambda: Shape(num_kv_heads=2), "shape.num_kv_heads=2 heads of keys cannot be shared by shape.num_heads=3"),
        (lambda: Shape(num_kv_heads=0), "shape.num_kv_heads=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


WIDE = Shape(hidden_size=256, intermediate_size=768, num_layers=7, num_heads=4, vocab_size=32768, batch=1, length=2048)
"""A vocabulary where a batch's logits would dominate."""
REALISTIC = Shape(576, 1536, num_layers=8, num_heads=9, vocab_size=49152, batch=1, length=1024)


def peak(variant: str, shape: Shape, **settings) -> float:
    cost = measure(variant, shape, settings, steps=1)
    assert 0 < cost.peak_mib < 1.1 * cost.resident_mib  # what is in use at once is at most what the process holds
    return cost.peak_mib


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eagle3_memory_grows_linearly_with_length_and_by_a_constant_per_step():
    """From the length on at which a chunk of the loss is full: 1024 supervised rows, half of the tokens here. A term
    that is quadratic in the length would make the second increase larger than the first."""
    one, two, three = (peak("eagle3", dataclasses.replace(WIDE, length=S)) for S in (2048, 4096, 6144))
    assert three - two <= 1.05 * (two - one)
    assert two - one > 0.3 * one
    three, five, seven = (peak("eagle3", WIDE, steps=steps) for steps in (3, 5, 7))
    assert seven - five == pytest.approx(five - three, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", [Shape(), WIDE, REALISTIC], ids=["default", "wide", "realistic"])
def test_hass_memory_is_that_of_one_pass(shape):
    """Three passes, each back-propagated on its own, beside EAGLE-1's one; with the gradient in between, far more."""
    eagle, hass, joined = peak("eagle", shape), peak("hass", shape), peak("hass", shape, detach=False)
    assert eagle < hass <= 1.15 * eagle
    assert joined > 1.1 * hass
