"""What training logs: means over rows, however the rows are dealt to micro-batches and processes."""

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from eaglelab.data.batch import Batch
from eaglelab.data.rows import compile_rows
from eaglelab.drafters.sharding import whole
from eaglelab.target.shape import TargetShape
from eaglelab.training import ShardedStrategy
from eaglelab.training.activations import Numerics
from eaglelab.training.flops import Load
from eaglelab.training.memory import Placement, step_memory
from eaglelab.variants import VARIANTS, OptimConfig
from eaglelab.variants.measures import RowMeans
from eaglelab.variants.rollout import rollouts
from tests.training.processes import assert_close_as_a_whole, assert_same_training, be_process, free_port
from tests.variants.conftest import loader, make_batch, tiny_target
from tests.variants.test_eagle import trainer

SETTINGS = {
    "eagle": {"noise": "none"},
    "hass": {"pass_weights": [1.0, 0.5, 2.0]},
    "eagle3": {"draft_vocab_size": 30, "steps": 3, "feature_weight": 0.1},
}
BY_STEP = {"eagle": ("",), "hass": ("", "/step1", "/step2"), "eagle3": ("", "/step1", "/step2")}
UNEVEN = [((9, 7), (12,)), ((6,),), ((14, 5),), ((20,), (4,), (5,))]
"""Segments of four micro-batches; their supervised rows differ, and so do their padded sizes."""


def union(batches: list[Batch]) -> Batch:
    """The same sequences as one batch."""
    width = max(batch.tokens_BS.shape[1] for batch in batches)
    fill = {"tokens_BS": 0, "valid_BS": 0, "segment_BS": -1, "position_BS": 0, "answer_BS": 0}
    parts = {
        name: torch.cat([F.pad(getattr(b, name), (0, width - b.tokens_BS.shape[1]), value=v) for b in batches])
        for name, v in fill.items()
    }
    rows = compile_rows(*(parts[name] for name in ("valid_BS", "segment_BS", "position_BS", "answer_BS")))
    return Batch(**parts, rows=rows)


def uneven_batches() -> list[Batch]:
    batches = [make_batch(lengths, seed=seed) for seed, lengths in enumerate(UNEVEN)]
    assert len({batch.supervised for batch in batches}) == 4
    return batches


def build(name, /, **optim_settings):
    torch.manual_seed(0)
    counts = torch.arange(61, 0, -1)
    optim = OptimConfig(**{"lr": 1e-3} | optim_settings)
    target = tiny_target(num_hidden_layers=8)
    return VARIANTS[name](target, optim, answer_counts=lambda: counts, **SETTINGS[name])


def measured(fit) -> dict[str, float]:
    """Row means of the last optimizer step."""
    other = ("lr", "seconds", "target_seconds")
    return {
        name: float(value)
        for name, value in fit.callback_metrics.items()
        if name.startswith("train/") and name.split("/")[1] not in other
    }


def fitted(name, batches, steps=1, **settings):
    module = build(name, **settings)
    fit = trainer(steps)
    fit.fit(module, loader(batches))
    assert fit.global_step == steps
    return module, measured(fit)


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert ours[key] == pytest.approx(value, rel=1e-6, abs=1e-6), key


@pytest.mark.parametrize("name", VARIANTS)
def test_four_uneven_micro_batches_log_what_one_batch_logs(name):
    """Pooled over rows, not a mean of means and not the last micro-batch's."""
    batches = uneven_batches()
    _, parts = fitted(name, batches, accumulate=4)
    _, whole = fitted(name, [union(batches)])
    assert_same(parts, whole)
    _, last = fitted(name, batches[-1:])
    assert abs(last["train/distillation"] - whole["train/distillation"]) > 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_each_optimizer_step_starts_anew(name):
    """Two steps of two micro-batches: the second logs its own rows. Tiny steps, so that weights stay put."""
    batches = uneven_batches()
    _, second = fitted(name, batches, steps=2, accumulate=2, lr=1e-12)
    _, alone = fitted(name, [union(batches[2:])], lr=1e-12)
    assert second.pop("train/supervised_rows") > alone.pop("train/supervised_rows")
    for key, value in alone.items():
        assert second[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize("name", VARIANTS)
def test_a_skipped_micro_batch_has_no_say(name):
    batches = uneven_batches()
    module, logged = fitted(name, [batches[0], make_batch(answer_from=99), batches[2], batches[3]], accumulate=4)
    assert logged.pop("train/skipped_batches") == module.skipped_batches == 1
    _, whole = fitted(name, [union([batches[0], *batches[2:]])])
    whole.pop("train/skipped_batches")
    assert_same(logged, whole)


@pytest.mark.parametrize("name", VARIANTS)
def test_everything_observable_is_logged(name):
    """Losses, accuracy and recall by step, time of the target, rows and skipped batches; errors by depth and tau."""
    module = build(name)
    fit = trainer(2, val_check_interval=1, limit_val_batches=1)
    fit.fit(module, loader([make_batch(((14, 9),))] * 2), loader([make_batch(((14, 9),))]))
    logged = set(fit.callback_metrics)
    by_step = ["regression", "distillation", "accuracy", "recall@5"]
    by_step += {"eagle": [], "hass": ["top_k"], "eagle3": ["argmax_coverage", "state_norm"]}[name]
    expected = {f"train/{what}{step}" for what in by_step for step in BY_STEP[name]}
    expected |= {f"train/{what}" for what in ("loss", "lr", "supervised_rows", "skipped_batches")}
    expected |= {"train/seconds", "train/target_seconds"}
    expected |= {
        f"val/{what}@{depth}"
        for what in ("prefix", "hit", "feature_error", "norm", "drift")
        for depth in range(1, module.chain.depth + 1)
    }
    assert logged == expected | {"val/tau"}
    assert fit.callback_metrics["train/seconds"] > fit.callback_metrics["train/target_seconds"] > 0
    assert fit.callback_metrics["train/supervised_rows"] == 2 * make_batch(((14, 9),)).supervised


def test_row_means_by_hand():
    means = RowMeans()
    means.update([(torch.tensor(6.0), 3), (torch.tensor(1.0), 4)], {"a": (torch.tensor(2.0), torch.tensor(4.0))})
    means.update([(torch.tensor(4.0), 2), (torch.tensor(0.0), 0)], {"a": (torch.tensor(1.0), 0)})
    assert {k: float(v) for k, v in means.compute().items()} == {"loss": 10 / 5 + 1 / 4, "a": 3 / 4}
    means.reset()
    means.update([], {"b": (torch.tensor(0.0), 0)})  # another step may measure other things; no rows give 0
    assert {k: float(v) for k, v in means.compute().items()} == {"loss": 0.0, "b": 0.0}


# ---- two processes -------------------------------------------------------------------------------------------


class Gradient(L.Callback):
    """Keeps the gradient of the last optimizer step."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [p.grad for p in module.network.parameters() if p.grad is not None]
        self.shares = [getattr(g, "_local_tensor", g).numel() / g.numel() for g in gradients]
        self.all = torch.cat([whole(g).flatten() for g in gradients])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.strategy.lightning_module_state_dict()  # a checkpoint in the middle of a step must not cost a gradient


def one_step(name, batches, *, optim=None, folder=None, **settings) -> dict:
    """One optimizer step of two micro-batches; with ``folder`` also its checkpoint, and a validation after it."""
    gradient = Gradient()
    module = build(name, accumulate=2, **(optim or {}))
    fit = trainer(1, callbacks=[gradient], **settings)
    fit.fit(module, loader(batches))
    assert fit.global_step == 1
    (optimizer,) = fit.strategy.optimizers
    state = [getattr(x, "_local_tensor", x) for one in optimizer.state.values() for x in one.values()]
    found = {"measured": measured(fit), "report": module.report, "gradient": gradient.all, "shares": gradient.shares}
    found["state"] = sum(x.nbytes for x in state if x.ndim)
    if folder is not None:
        fit.save_checkpoint(folder)
        found["validated"] = fit.validate(module, loader([make_batch(((14, 9),))]), verbose=False)[0]
    return found


MUON = {"name": "muon", "clip_norm": 0.05}
SHARDED = {name: {} for name in VARIANTS} | {"clipped": {"clip_value": 1e-3}, "muon": MUON, "idle": {}}
"""Optimizer settings of the jobs with a sharded drafter; those that are no variant train EAGLE-1."""


def dealt(rank: int) -> dict[str, list[Batch]]:
    """Two micro-batches for each process; where the rows run out differs."""
    batches, empty = uneven_batches(), make_batch(answer_from=99)
    jobs = {name: ([batches[0], batches[1]], [batches[3], empty]) for name in (*VARIANTS, "clipped", "muon")}
    jobs["empty end"] = ([batches[0], empty], [batches[3], empty])
    jobs["idle"] = ([batches[0], batches[1]], [empty, empty])
    even = ([make_batch(seed=0), make_batch(seed=1)], [make_batch(seed=2), make_batch(seed=3)])
    jobs |= {f"even {name}": even for name in VARIANTS}
    return {name: job[rank] for name, job in jobs.items()}


def variant_of(job: str) -> str:
    name = job.split()[-1]
    return name if name in VARIANTS else "eagle"


def worker(rank: int, port: int, folder: str) -> None:
    be_process(rank, port)
    jobs = dealt(rank)
    replicated = ["empty end", *(job for job in jobs if variant_of(job) == job.split()[-1])]
    results = {job: one_step(variant_of(job), jobs[job], strategy="ddp", devices=2) for job in replicated}
    for job, optim in SHARDED.items():
        settings = {"optim": optim, "folder": f"{folder}/{job}.ckpt", "devices": 2}
        results[f"sharded {job}"] = one_step(variant_of(job), jobs[job], strategy=ShardedStrategy(), **settings)
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("gloo")
    torch.multiprocessing.spawn(worker, (free_port(), str(folder)), nprocs=2)
    found = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    checkpoints = {job: torch.load(folder / f"{job}.ckpt", weights_only=True) for job in SHARDED}
    return [process | {"checkpoints": checkpoints} for process in found]


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_log_what_one_logs(name, two_processes):
    """gloo, accumulate 2; uneven rows, and one process is without any at the last micro-batch."""
    batches = uneven_batches()
    module, one = fitted(name, [union([batches[0], batches[1], batches[3]])])
    for process in two_processes:
        assert_same(process[name]["measured"], one)
        assert process[name]["report"] == module.report
    assert one["train/supervised_rows"] == sum(batches[i].supervised for i in (0, 1, 3))


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_have_the_gradient_of_one(name, two_processes):
    """Of micro-batches with the same rows each; that of HASS's shared keys comes with the last pass, once."""
    first, second = (process[f"even {name}"]["gradient"] for process in two_processes)
    assert first.equal(second)
    batches = [union([make_batch(seed=seed), make_batch(seed=seed + 2)]) for seed in (0, 1)]
    alone = one_step(name, batches)["gradient"]
    assert (first - alone).abs().max() < 1e-5 * alone.abs().max()


def test_a_step_that_ends_with_an_empty_micro_batch_averages_its_gradients(two_processes):
    """The second micro-batch is empty everywhere: nothing else would exchange the first one's gradients."""
    batches, empty = uneven_batches(), make_batch(answer_from=99)
    first, second = (process["empty end"]["gradient"] for process in two_processes)
    assert first.equal(second)
    alone = one_step("eagle", [union([batches[0], batches[3]]), empty])["gradient"]
    torch.testing.assert_close(first, alone, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("job", SHARDED)
def test_a_sharded_drafter_trains_as_a_whole_one(job, two_processes, tmp_path):
    """FSDP2 over two processes against one with the joint micro-batches, in which one process may have no rows.

    Gradients, also clipped; weights and optimizer state afterwards, in one checkpoint of the same form.
    """
    here = tmp_path / "one.ckpt"
    module = build(variant_of(job), **SHARDED[job])
    target, spread = TargetShape.of_model(module.target.model), Placement(2, sharded=True, drafter="sharded")
    arguments = (module.drafter_config, rollouts(module.contract), Load(1, 20, 19, 10), module.optim, Numerics())
    planned = step_memory(target, *arguments, spread)
    both = [union(list(micro)) for micro in zip(*(dealt(rank)[job] for rank in range(2)), strict=True)]
    alone = one_step(variant_of(job), both, optim=SHARDED[job], folder=here)
    for process in two_processes:
        found = process[f"sharded {job}"]
        assert_close_as_a_whole(found["gradient"], alone["gradient"], 1e-4 if job == "clipped" else 1e-5)
        assert found["validated"].keys() == alone["validated"].keys()
        assert found["validated"]["val/feature_error@1"] == pytest.approx(
            alone["validated"]["val/feature_error@1"], rel=1e-3
        )
        assert found["state"] == pytest.approx(planned.optimizer, rel=0.01)
        assert max(found["shares"]) < 0.6  # no process holds a whole gradient when the optimizer steps
    one, two = torch.load(here, weights_only=True), two_processes[0]["checkpoints"][job]
    rounding = {"weights": 0.1 if job == "muon" else 0.002, "state": 2e-4 if job == "clipped" else 2e-5}  # Muon: bf16
    assert_same_training(one, two, module.state_dict(), **rounding)
