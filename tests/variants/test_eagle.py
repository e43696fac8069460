"""EAGLE-1 training: what moves, what must not, and that it learns."""

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from eaglelab.target import FINAL
from eaglelab.variants import View
from tests.variants.conftest import eagle, loader, make_batch, tiny_target


def trainer(max_steps, tmp_path=None, **settings) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "max_steps": max_steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**defaults | settings)


class Probe(L.Callback):
    """Looks at the target and the drafter after every training step."""

    def __init__(self):
        self.losses, self.with_gradient = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.with_gradient.append(all(p.grad is not None for p in module.network.parameters()))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.target.assert_frozen()
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def test_one_repeated_batch_is_learned(target):
    """The loss of variant eagle on one repeated batch falls by more than 90 %, above its floor.

    The cross-entropy term cannot fall below the teacher's entropy, so the fall is measured above 0.1 * H(q).
    """
    batch = make_batch()
    module = eagle(target, noise="none", optim={"lr": 1e-2})
    probe = Probe()
    trainer(400, callbacks=[probe]).fit(module, loader([batch]))

    view = View.of(batch, target, (FINAL,))
    q = target.lm_head(view.teacher().flatten(0, 1)[batch.rows.supervised_M]).softmax(-1)
    floor = float(-0.1 * (q * q.log()).sum(-1).mean())
    assert probe.losses[-1] - floor < 0.1 * (probe.losses[0] - floor)
    assert all(probe.with_gradient)
    assert len(probe.with_gradient) == 400


def test_loss_is_the_two_published_terms(target):
    """Value of the first step against the definition, over supervised rows only, noise off."""
    batch = make_batch()
    module = eagle(target, noise="none")
    probe = Probe()
    reference = module.network
    view = View.of(batch, target, (FINAL,))
    total, count = 0.0, 0
    with torch.no_grad():
        for b, row in enumerate(((9, 7), (12,))):
            start = 0
            for n in row:
                ids = batch.tokens_BS[b : b + 1, start : start + n]
                feature = target.features(ids, (FINAL,))[FINAL]
                mask = torch.full((n - 1, n - 1), -torch.inf).triu(1)

                def attend(q, k, v, mask=mask):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

                out = reference(feature[:, :-1], target.embed(ids[:, 1:]), torch.arange(n - 1)[None], attend)
                for t in range(2, n - 1):  # x_{t+1} in the answer, which starts at token 3
                    residual = (out[0, t] - feature[0, t + 1]).abs()
                    huber = torch.where(residual < 1, residual**2 / 2, residual - 0.5).mean()
                    q = target.lm_head(feature[0, t + 1]).softmax(-1)
                    ce = -(q * target.lm_head(out[0, t]).log_softmax(-1)).sum()
                    total, count = total + huber + 0.1 * ce, count + 1
                start += n
    assert count == batch.rows.num_supervised
    assert view.rows is batch.rows
    trainer(1, callbacks=[probe]).fit(module, loader([batch]))
    assert probe.losses[0] == pytest.approx(float(total / count), rel=1e-5)


def test_hard_labels_distil_the_token_two_ahead(target):
    """-log p(x_{t+2}) instead of the soft term, and only where x_{t+2} is a token of the same segment."""
    lengths = ((9, 7), (12,))
    batch = make_batch(lengths)
    view = View.of(batch, target, (FINAL,))
    module = eagle(target, noise="none", labels="hard", regression_weight=0.0, distillation_weight=1.0)
    network = module.network
    total, count = 0.0, 0
    with torch.no_grad():
        for b, row in enumerate(lengths):
            start = 0
            for n in row:
                ids = batch.tokens_BS[b : b + 1, start : start + n]
                feature = target.features(ids, (FINAL,))[FINAL]
                mask = torch.full((n - 1, n - 1), -torch.inf).triu(1)

                def attend(q, k, v, mask=mask):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

                out = network(feature[:, :-1], target.embed(ids[:, 1:]), torch.arange(n - 1)[None], attend)
                for t in range(2, n - 2):  # soft rows reach n - 2, which has no x_{t+2}
                    total = total - target.lm_head(out[0, t]).log_softmax(-1)[ids[0, t + 2]]
                    count += 1
                start += n
    (one,) = module.passes(view)
    assert count == batch.rows.num_supervised - 3 == module.supervised(batch.rows).numel()
    assert float(one.loss) == pytest.approx(float(total / count), rel=1e-5)
    assert float(one.means["distillation"]) == pytest.approx(float(total / count), rel=1e-5)
    # what is measured against the target stays the target's
    (soft,) = eagle(target, noise="none").passes(view)
    assert one.measures["accuracy"][0] <= soft.measures["accuracy"][0]


def test_a_batch_with_soft_rows_only_is_empty_for_hard_labels(target):
    """Six tokens, answer from the last one: its row exists, the token after it does not."""
    batch = make_batch(((6,),), answer_from=5)
    assert batch.rows.num_supervised == 1
    module = eagle(target, labels="hard", optim={"weight_decay": 0.5})
    before = {name: p.clone() for name, p in module.network.named_parameters()}
    fit = trainer(1, limit_train_batches=2, max_epochs=1)
    fit.fit(module, loader([batch, batch]))
    assert (fit.global_step, module.skipped_batches, module.supervised_rows) == (0, 2, 0)
    for name, p in module.network.named_parameters():
        assert p.equal(before[name]), name


def test_empty_plan_changes_nothing_not_even_by_weight_decay(target):
    empty = make_batch(answer_from=99)
    assert empty.rows.num_supervised == 0
    module = eagle(target, optim={"weight_decay": 0.5})
    before = {name: p.clone() for name, p in module.network.named_parameters()}
    fit = trainer(1, limit_train_batches=3, max_epochs=1)
    fit.fit(module, loader([empty, empty, empty]))
    assert module.skipped_batches == 3
    assert fit.global_step == 0
    for name, p in module.network.named_parameters():
        assert p.equal(before[name]), name


def test_same_seed_same_numbers_other_seed_other_noise(target):
    weights = []
    start = eagle(target).network.state_dict()
    for seed in (0, 0, 1):
        module = eagle(target, noise="paper_uniform", seed=seed)
        module.network.load_state_dict(start)
        trainer(3).fit(module, loader([make_batch()]))
        weights.append(torch.cat([p.flatten() for p in module.network.parameters()]))
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_noise_has_a_random_stream_of_its_own(target):
    """Seed and micro-batch decide it alone: a resumed run draws what an uninterrupted one does."""
    view = View.of(make_batch(), target, (FINAL,))
    module = eagle(target, noise="paper_uniform")
    draws = []
    for somebody in (1, 2):
        torch.manual_seed(somebody)
        before = torch.get_rng_state()
        draws.append(module.noisy(torch.zeros(*view.rows.legal_BR.shape, 4), view))
        assert torch.get_rng_state().equal(before)
    assert draws[0].abs().max() > 0
    assert draws[0].equal(draws[1])
    module.micro_step += 1
    assert not module.noisy(torch.zeros_like(draws[0]), view).equal(draws[0])


def test_noise_touches_inputs_only_and_training_only(target):
    """Teachers are clean, and validation is the same whatever the noise."""
    batch = make_batch()
    taus = []
    for law in ("none", "gaussian"):
        module = eagle(target, noise=law, noise_scale=5.0)
        module.chain.update(module.network, View.of(batch, target, (FINAL,)))
        taus.append(module.chain.compute()["feature_error@1"])
    assert taus[0] == taus[1]


def test_length_scaled_noise_knows_the_sample_inside_a_packed_row(target):
    """U[-0.1, 0.1] * 512 / L, L the tokens of the row's own sample: 9, 7 and 12 here, not those of the packed row."""
    batch = make_batch(((9, 7), (12,)))
    module = eagle(target, noise="length_scaled")
    view = View.of(batch, target, (FINAL,))
    plain_BRd = torch.zeros(*batch.rows.legal_BR.shape, 512)
    size_BR = module.noisy(plain_BRd, view).abs().amax(-1)
    for (b, segment), length in {(0, 0): 9, (0, 1): 7, (1, 0): 12}.items():
        mine = batch.rows.legal_BR[b] & (batch.rows.segment_BR[b] == segment)
        width = 0.1 * 512 / length
        assert mine.sum() == length - 1
        assert ((size_BR[b][mine] <= width) & (size_BR[b][mine] > 0.95 * width)).all()


def test_accumulation_equals_one_larger_batch(target):
    """Two micro-batches of equal row counts give the step of their union."""
    first, second = make_batch(((9,),), seed=1), make_batch(((9,),), seed=2)
    union = make_batch(((9,), (9,)))
    union.tokens_BS = torch.cat([first.tokens_BS, second.tokens_BS])
    assert union.rows.num_supervised == 2 * first.rows.num_supervised
    results = []
    for batches, accumulate in (([first, second], 2), ([union], 1)):
        module = eagle(target, noise="none", optim={"accumulate": accumulate})
        fit = trainer(1)
        fit.fit(module, loader(batches))
        assert fit.global_step == 1
        results.append(torch.cat([p.detach().flatten() for p in module.network.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_an_empty_batch_at_the_end_of_an_accumulation_keeps_its_gradient(target):
    """rows, empty | rows, empty at accumulate 2: two updates, each of its own window's gradient."""
    batch, empty = make_batch(((9,),), seed=1), make_batch(answer_from=99)
    results = []
    for batches, accumulate in (([batch, empty, batch, empty], 2), ([batch, batch], 1)):
        module = eagle(target, noise="none", optim={"accumulate": accumulate})
        seen = []

        class Look(L.Callback):
            def on_before_optimizer_step(self, trainer, module, optimizer, seen=seen):
                seen.append(torch.cat([p.grad.flatten() for p in module.network.parameters()]))

        fit = trainer(2, callbacks=[Look()])
        fit.fit(module, loader(batches))
        assert fit.global_step == 2
        results.append(seen[0] * accumulate)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("limit", ["clip_value", "clip_norm"])
def test_gradients_are_clipped_under_every_precision(target, limit, precision):
    """AdamW is the fused one. Its first moment after a step is a tenth of the gradient; fp16 has a scale in between."""
    settings = {"precision": precision}
    if precision == "16-mixed":  # which the trainer itself would not take on a CPU
        settings = {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))}
    moments = {}
    for value in (None, 1e-3):
        module = eagle(target, noise="none", optim={limit: value})
        fit = trainer(1, **settings)
        fit.fit(module, loader([make_batch()]))
        state = fit.optimizers[0].state.values()
        assert len(state) == len(list(module.network.parameters()))
        moments[value] = 10 * torch.cat([one["exp_avg"].flatten() for one in state])
    whole = moments[None]
    assert whole.norm() > 0.01  # otherwise nothing would be clipped
    clipped = whole.clamp(-1e-3, 1e-3) if limit == "clip_value" else whole * (1e-3 / whole.norm())
    torch.testing.assert_close(moments[1e-3], clipped, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("limit", "kind"), [("clip_value", "value"), ("clip_norm", "norm")])
def test_clipping_by_value_is_not_clipping_by_norm(target, limit, kind):
    seen = {}

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            grads = [p.grad.flatten() for p in module.network.parameters() if p.grad is not None]
            if grads:
                seen["grad"] = torch.cat(grads)

    module = eagle(target, noise="none", optim={limit: 0.01})
    trainer(1, callbacks=[Look()]).fit(module, loader([make_batch()]))
    if kind == "value":
        assert seen["grad"].abs().max() == pytest.approx(0.01)
        assert seen["grad"].norm() > 0.011
    else:
        assert seen["grad"].norm() == pytest.approx(0.01, rel=1e-3)


def test_target_is_not_in_the_module_tree(target):
    module = eagle(target)
    assert all(name.startswith("network.") for name in module.state_dict())
    module.train()
    target.assert_frozen()


def test_wrong_recipe_is_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="clip_value or clip_norm, not both"):
        eagle(target, optim={"clip_value": 1.0, "clip_norm": 1.0})
    with pytest.raises(ValueError, match="schedule='step' is not one of"):
        eagle(target, optim={"schedule": "step"})
