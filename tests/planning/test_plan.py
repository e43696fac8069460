"""`eaglelab plan`: what it tells equals what training does, and what does not fit comes with ways that do."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from eaglelab.cli.config import config_dir, register_resolvers
from eaglelab.data import pack
from eaglelab.planning import make_plan, plan_table
from eaglelab.planning.advice import USABLE
from eaglelab.planning.table import count, size
from eaglelab.target import FrozenTarget
from eaglelab.target.shape import TargetShape, read_description
from eaglelab.training.job import build_data, build_module

EIGHT_B = ["shape.hidden_size=4096", "shape.num_layers=32", "target.dtype=bfloat16"]
GPUS = ["trainer=ddp", "trainer.accelerator=gpu", "trainer.precision=bf16-mixed", "devices=8", "device_gib=80"]
LONG = ["data_tokens=2e8", "data.max_length=2048", "data.row_length=2048", "optim=eagle3_pinned", "recipe=none"]


def config_of(*overrides: str):
    register_resolvers()
    with initialize_config_dir(config_dir=config_dir(), job_name="plan", version_base="1.3"):
        config = compose(config_name="plan", overrides=list(overrides))
    config.run_dir = "unused"
    return config


def plan_of(*overrides: str):
    return make_plan(config_of(*overrides))


@pytest.fixture(scope="module")
def bundled():
    return {variant: plan_of(f"variant={variant}", "data.limit=300", "sample=300") for variant in ("eagle", "eagle3")}


@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_a_counted_plan_is_what_training_finds(variant, bundled):
    """Bundled target, 300 conversations, all of them counted."""
    plan = bundled[variant]
    config = config_of(f"variant={variant}", "data.limit=300")
    target = FrozenTarget.load("bundled")
    data = build_data(config, target)
    data.setup("fit")
    report, module = data.report.train, build_module(config, target, data)
    assert plan.data.spread == 0
    assert plan.data.tokens == report.tokens
    assert plan.data.supervised == report.supervised_rows
    assert plan.data.rows == pytest.approx(report.rows)
    assert plan.data.padding_share == pytest.approx(report.padding_share)
    assert plan.trained == sum(p.numel() for p in module.network.parameters() if p.requires_grad)
    assert plan.target.parameters == sum(p.numel() for p in target.model.parameters())
    assert plan.steps_per_epoch == len(data.train_dataloader()) // config.optim.accumulate


def test_a_sample_stands_for_all_within_its_spread(bundled):
    sampled = plan_of("data.limit=300", "sample=100")
    assert sampled.data.sampled == 100
    assert 0 < sampled.data.spread < 0.2 * sampled.data.tokens
    assert abs(sampled.data.tokens - bundled["eagle"].data.tokens) < 1.5 * sampled.data.spread


def test_packing_wastes_less_than_five_per_cent_on_the_bundled_data(bundled):
    assert 0 < bundled["eagle"].data.padding_share < 0.05
    assert f"{bundled['eagle'].data.padding_share:.1%}" in plan_table(bundled["eagle"])


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_packing_wastes_less_than_five_per_cent_on_skewed_lengths(sigma):
    """Log-normal lengths around 400 in rows of 2,048; long ones are cut, and many rows are full of short ones."""
    lengths = np.random.default_rng(0).lognormal(np.log(400), sigma, 5000).clip(8, 2048).astype(int)
    assert 1 - lengths.sum() / (2048 * len(pack(lengths.tolist(), 2048))) < 0.05


def test_an_8b_target_that_does_not_fit_comes_with_ways_that_do():
    overrides = ["variant=eagle3", *EIGHT_B, *GPUS, *LONG]
    plan = plan_of(*overrides, "data.batch_size=16")
    assert plan.fits is False
    assert plan.target.parameters == pytest.approx(8.03e9, rel=0.01)
    assert "DOES NOT FIT" in plan_table(plan)
    assert {way.change for way in plan.ways} >= {"data.batch_size=8", "trainer=fsdp", "variant.draft_vocab_size=32000"}
    for way in plan.ways:
        assert way.peak <= USABLE * plan.device_bytes
        changes = way.change.split(" (")[0].split()
        if "features=store" not in changes:  # a store has to exist to be planned with
            changed = plan_of(*overrides, "data.batch_size=16", *_with_gpus(changes))
            assert changed.fits
            assert changed.memory.peak == pytest.approx(way.peak, rel=0.01)


def _with_gpus(changes: list[str]) -> list[str]:
    if "trainer=fsdp" not in changes:
        return changes
    return [change for change in changes if change != "trainer=fsdp"] + [
        "trainer.strategy={_target_: eaglelab.training.ShardedStrategy}"
    ]


@pytest.mark.parametrize(
    ("overrides", "sharded", "drafter", "says"),
    [
        (["trainer=ddp"], False, "whole", "4 cpus, 32-true\n"),
        (["trainer=fsdp"], True, "sharded", "target and drafter sharded"),
        (["trainer=fsdp", "trainer.strategy.shard_drafter=false"], True, "whole", "32-true, target sharded\n"),
        (["trainer=deepspeed"], False, "partitioned", "optimizer partitioned"),
    ],
)
def test_a_plan_knows_what_is_spread(overrides, sharded, drafter, says):
    shape = ["shape.hidden_size=256", "shape.num_layers=8", "data_tokens=1e5", "trainer.accelerator=cpu", "devices=4"]
    plan = plan_of("variant=eagle", *shape, *overrides)
    assert (plan.sharded, plan.drafter_placement) == (sharded, drafter)
    assert says in plan_table(plan)
    assert plan.to_dict()["drafter_placement"] == drafter
    whole = plan_of("variant=eagle", *shape, "trainer=ddp").memory
    assert (plan.memory.optimizer * 4 == pytest.approx(whole.optimizer, rel=1e-3)) == (drafter != "whole")
    assert (plan.memory.target < whole.target) == sharded


def test_a_plan_knows_a_target_that_takes_a_few_rows_at_a_time():
    """Its activations are of so many rows; what the drafter reads is of all."""
    shape = ["variant=eagle", *EIGHT_B, *GPUS, *LONG, "data.batch_size=64"]
    whole, parts = plan_of(*shape), plan_of(*shape, "features.rows=4")
    assert parts.memory.target_pass < 0.5 * whole.memory.target_pass
    assert parts.memory.features == whole.memory.features
    assert plan_of(*shape, "features.rows=64").memory == whole.memory


def test_a_plan_knows_a_target_one_batch_early():
    """Its pass over the next batch has its memory beside the drafter's step."""
    shape = ["variant=eagle", *EIGHT_B, *GPUS, *LONG, "data.batch_size=64"]
    plain, ahead = plan_of(*shape), plan_of(*shape, "features.ahead=true")
    memory = plain.memory
    assert ahead.memory.peak == memory.resident + memory.target_pass + memory.features + memory.kept + memory.chunk
    assert ahead.memory.peak > memory.peak
    between = f"device_gib={(ahead.memory.peak + memory.peak) / 2 / USABLE / 2**30}"
    assert "features.ahead=false" in {way.change for way in plan_of(*shape, "features.ahead=true", between).ways}
    assert plan_of(*shape, between).ways == []
    with pytest.raises(ValueError, match="features.rows=-1.*null for all"):
        plan_of(*shape, "features.rows=-1")


def test_a_plan_knows_checkpointed_steps():
    shape = ["variant=eagle3", *EIGHT_B, *GPUS, *LONG, "data.batch_size=16"]
    whole, checkpointed = plan_of(*shape), plan_of(*shape, "checkpoint_steps=true")
    assert checkpointed.memory.kept < 0.5 * whole.memory.kept
    assert checkpointed.memory.peak < whole.memory.peak
    assert "checkpoint_steps=true" in {way.change for way in whole.ways}
    assert not any("checkpoint_steps" in way.change for way in checkpointed.ways)
    with pytest.raises(ValueError, match="checkpoint_steps=true does nothing for eagle"):
        plan_of("variant=eagle", *EIGHT_B, *GPUS, *LONG, "checkpoint_steps=true")


def test_ways_are_joined_where_none_suffices_alone():
    tight = plan_of("variant=eagle3", *EIGHT_B, *GPUS, *LONG, "data.batch_size=64", "device_gib=40")
    assert tight.ways
    for way in tight.ways:
        assert len(way.change.split()) > 1
        assert way.peak <= USABLE * tight.device_bytes


def test_nothing_known_helps_a_device_that_is_far_too_small():
    plan = plan_of("variant=eagle3", *EIGHT_B, *GPUS, *LONG, "device_gib=0.1")
    assert plan.ways == []
    assert "No setting known here makes it fit" in plan_table(plan)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["devices=0"], "devices=0"),
        (["device_gib=0"], "device_gib=0"),
        (["data_tokens=0"], "data_tokens=0"),
        (["shape.num_layers=3"], "shape.hidden_size is missing"),
        (["shape.hidden_size=64", "shape.num_layers=8"], "data_tokens=N"),
        (["target=hf", "target.source=/nowhere"], "/nowhere does not exist"),
        (["variant=eagle3", "variant.steps=99"], "variant.steps=99"),
        (["variant=eagle3", "variant.draft_vocab_size=99999"], "must be from 1 to 2048"),
        (["target.dtype=bfloat16"], "add trainer.precision=bf16-mixed"),
        (["trainer.precision=64-true"], "trainer.precision=64-true"),
        (["data.max_length=9999", "data.row_length=9999"], "beyond the 2048 positions"),
        (["trainer.devices=auto"], "devices=N"),
    ],
)
def test_wrong_input_is_refused_with_a_way_out(overrides, says):
    with pytest.raises(ValueError, match=says):
        plan_of(*overrides)


def test_only_routed_experts_are_work():
    """Two of eight experts per token: a quarter of their weights is multiplied."""
    config = Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        intermediate_size=64,
        vocab_size=50,
    )
    shape = TargetShape.of_config(config)
    experts = 2 * 8 * 3 * 32 * 16
    attention = 2 * (2 * 32 * 32 + 2 * 32 * 16)
    assert shape.active == attention + experts // 4 + 2 * 8 * 32  # and the routers


def test_a_shape_is_read_from_a_config_alone(tmp_path):
    """No weights beside the config; counts as the model has them."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=61
    )
    config.save_pretrained(tmp_path)
    described, tokenizer = read_description(tmp_path)
    shape, model = TargetShape.of_config(described), LlamaForCausalLM(config)
    assert tokenizer is None
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.active == TargetShape.of_model(model).active == 3 * 32 * (4 * 32 + 3 * 48)
    assert (shape.embedding, shape.head) == (61 * 32 + 32, 61 * 32)


def test_numbers_read_well():
    assert [size(x) for x in (0, 1023, 1536, 5 * 2**30)] == ["0 B", "1,023 B", "1.5 KiB", "5.0 GiB"]
    assert [count(x) for x in (7, 1234, 8.03e9, 9.996e14)] == ["7", "1.23 k", "8.03 G", "1 P"]


def test_the_command_prints_and_saves(tmp_path):
    job = [sys.executable, "-m", "eaglelab.cli.main", "plan", *EIGHT_B, *GPUS, *LONG, "out=plan.json"]
    done = subprocess.run(job, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["fits"] is True
    assert saved["memory"]["peak"] > saved["memory"]["target"] > 15e9
    assert "written: plan.json" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
