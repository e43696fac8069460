"""A target spread over two processes says what the whole one says."""

import logging
import os
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers.distributed import DistributedConfig

from eaglelab.target import FrozenTarget, HeadOnlyTarget, ShardedTarget
from tests.target.target_families import FAMILIES, build
from tests.training.processes import free_port
from tests.variants.conftest import tiny_target

SHARES = hasattr(DistributedConfig(), "fsdp_plan")
"""Whether this release of the library reads checkpoints in shares; otherwise all this holds of a target read whole."""


def answers(target: FrozenTarget) -> dict:
    """Of plain rows and of packed ones, which need masks; of embedding and head."""
    tokens_BS = torch.arange(24).view(2, 12) % target.vocab_size
    segment_BS = (torch.arange(12) // 5).expand(2, 12)
    plain = target.features(tokens_BS, (1, "final"))
    masked = target.features(tokens_BS, (1, "final"), segment_BS=segment_BS)
    hidden = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    found = {f"plain {tap}": value for tap, value in plain.items()}
    found |= {f"masked {tap}": value for tap, value in masked.items()}
    return found | {"head": target.lm_head(hidden), "embedding": target.embed(tokens_BS)}


def layer_weights(target: FrozenTarget) -> int:
    """Weights of the decoder layers that lie on this process."""
    parameters = {p for layer in target._wiring.layers for p in layer.parameters()}
    return sum(getattr(p, "_local_tensor", p).numel() for p in parameters)


def facts(target: FrozenTarget) -> dict:
    return {
        "answers": answers(target),
        "fingerprint": target.fingerprint.to_dict(),
        "eos": sorted(target.eos_token_ids),
        "shape": (target.num_layers, target.hidden_size, target.vocab_size, target.max_positions),
        "weights": layer_weights(target),
        "tied": target.head_weight is target._wiring.embedding.weight,
    }


def worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    told: list[str] = []
    logging.getLogger("eaglelab.target.sharded").addFilter(lambda record: told.append(record.getMessage()) or True)
    found = {}
    in_memory = tiny_target()
    in_memory.shard("cpu")
    in_memory.assert_frozen()
    found["in memory"] = facts(in_memory)
    for name in FAMILIES:
        target = ShardedTarget.load(f"{folder}/{name}")
        assert (type(target) is ShardedTarget and layer_weights(target) == 0) is SHARES
        target.shard("cpu")
        target.assert_frozen()
        assert all(isinstance(layer, FSDPModule) for layer in target._wiring.layers)
        assert not any("distributed" in name for name in vars(target.text_config))
        found[name] = facts(target)
    target.shard("cpu")  # once more changes nothing
    found["twice"] = facts(target)
    assert len(told) == (0 if SHARES else len(FAMILIES)), told
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    elsewhere = ShardedTarget.load(f"{folder}/qwen2")  # the library would put its shares on a GPU
    elsewhere.shard("cpu")
    found["elsewhere"] = facts(elsewhere)
    assert "reads the whole target" in told[-1]
    assert ("shares are not read on cpu" in told[-1]) is SHARES
    HeadOnlyTarget.load(f"{folder}/llama").shard("cpu")  # as training from a store does
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@contextmanager
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for name in FAMILIES:
        build(name).save_pretrained(folder / name)
    torch.multiprocessing.spawn(worker, (free_port(), str(folder)), nprocs=2)
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ["in memory", *FAMILIES, "twice", "elsewhere"])
def test_two_processes_hold_half_each_and_agree_with_the_whole(name, two_processes):
    """Every family, its layers read by each process in its share alone; features are the same bits."""
    folder, processes = two_processes
    family = {"twice": list(FAMILIES)[-1], "elsewhere": "qwen2"}.get(name, name)
    with one_thread():  # as in the processes: experts are summed in another order by two
        whole = facts(tiny_target() if name == "in memory" else FrozenTarget.load(folder / family))
    for process in processes:
        found = dict(process[name])
        assert found.pop("weights") == pytest.approx(0.5 * whole["weights"], rel=0.02)
        for what, value in found.pop("answers").items():
            assert value.equal(whole["answers"][what]), what
        assert found == {key: value for key, value in whole.items() if key not in ("weights", "answers")}


def test_one_process_has_nothing_to_share(tmp_path):
    with pytest.raises(ValueError, match="sharded over several processes, and there is one"):
        tiny_target().shard("cpu")
    target = ShardedTarget.load("bundled")
    if not SHARES:
        return
    with pytest.raises(ValueError, match="no layers before it is sharded"):
        target.features(torch.zeros(1, 4, dtype=torch.int64), ("final",))
    with pytest.raises(ValueError, match="sharded over several processes, and there is one"):
        target.shard("cpu")


@pytest.mark.parametrize("reason", ["not in safetensors files", "quantised", "family", "cannot do it"])
def test_a_checkpoint_that_cannot_be_read_in_shares_is_read_whole_and_says_so(reason, tmp_path, caplog, monkeypatch):
    model = build("llama")
    model.save_pretrained(tmp_path)
    if reason == "not in safetensors files":
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    if reason == "quantised":  # as the library tells it: the weights here are plain, and no quantiser is installed
        import eaglelab.target.head_only as head_only

        real = head_only._configs

        def configs(*arguments):
            whole, short = real(*arguments)
            whole.quantization_config = {"quant_method": "fp8"}
            return whole, short

        monkeypatch.setattr(head_only, "_configs", configs)
    if reason == "cannot do it":  # before transformers 5.23
        monkeypatch.delitem(DistributedConfig.__dataclass_fields__, "fsdp_plan", raising=False)
    if reason == "family":
        monkeypatch.setattr(ShardedTarget, "_with_one_layer", classmethod(_raises))
    with caplog.at_level(logging.WARNING):
        target = ShardedTarget.load(tmp_path)
    assert type(target) is FrozenTarget
    assert reason in caplog.text and "reads the whole target" in caplog.text
    for what, value in answers(target).items():
        assert value.equal(answers(FrozenTarget(model))[what]), what


def _raises(cls, *arguments):
    raise ValueError("one layer is no model of its family")
