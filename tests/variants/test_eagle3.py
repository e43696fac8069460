"""EAGLE-3 against the pinned implementation's numbers, the sequential draft chain, and its maps."""

import types

import pytest
import torch
from torch.nn import functional as F

from eaglelab.data.draft_vocabulary import DraftVocabulary
from eaglelab.decoding import Chain, Engine, make_tree
from eaglelab.drafters import FusedDrafter
from eaglelab.target import ManifestMismatch
from eaglelab.training import RunFolder
from eaglelab.variants import Eagle3Module, OptimConfig, Pass, View
from eaglelab.variants.manifest import require_same_contract
from tests.oracles.golden import Golden
from tests.variants.conftest import loader, make_batch, tiny_target
from tests.variants.reference import assert_same_gradients, chain_states, gradients
from tests.variants.test_eagle import trainer


@pytest.fixture(scope="module")
def deep_target():
    return tiny_target(num_hidden_layers=8)


def eagle3(target, **settings) -> Eagle3Module:
    torch.manual_seed(0)
    counts = torch.arange(target.vocab_size, 0, -1)
    return Eagle3Module(target, OptimConfig(lr=1e-3), answer_counts=lambda: counts, **settings)


def perturb_norms(module) -> None:
    """Norm weights away from 1, so that a norm too many or too few shows."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in module.network.named_parameters():
            if weight.dim() == 1:
                weight.mul_(0.5 + torch.rand(weight.shape, generator=g))
                assert "norm" in name


def test_golden_seven_steps():
    """Per-step losses, their 0.8^s sum and every gradient, with the published reduction and draft vocabulary."""
    golden = Golden("eagle3_train_s0")
    target = tiny_target(vocab_size=97, rms_norm_eps=1e-5, num_hidden_layers=8)
    module = eagle3(target, reduction="pinned", draft_vocab_size=40)
    weights = golden.group("w.")
    embedding = weights.pop("embed_tokens.weight")
    module.network.load_state_dict(weights, strict=True)
    stub = types.SimpleNamespace(
        embed=lambda ids: F.embedding(ids, embedding),
        lm_head=lambda logits: logits,
        max_positions=64,
        head_logits_are_linear=False,
    )
    rows = golden.rows()
    taps, logits = rows.gather(golden["in.taps"]), golden["in.target_logits"]
    view = View(rows, golden["in.input_ids"], taps, logits, stub, has_last_feature=False)  # recorded are the logits

    (one,) = module.passes(view)
    assert len(one.terms) == 7
    for step, expected in enumerate(golden.facts["losses"]):
        total, slots = one.terms[step]
        assert float(total / slots) == pytest.approx(0.8**step * expected, rel=1e-5), step
    assert one.loss.item() == pytest.approx(golden.facts["total"], rel=1e-5)
    one.loss.backward()
    for name, parameter in module.network.named_parameters():
        torch.testing.assert_close(parameter.grad, golden[f"grad.{name}"], rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fc_norm": True, "recurrence": "post_norm"},
        {"recurrence": "post_norm", "detach": True},
        {"taps": [3]},
        {"taps": [0, 2, 4, 5, 7], "fc_norm": True},
    ],
    ids=["eagle3", "eagle3.1", "post_norm", "one_tap", "five_taps"],
)
def test_steps_equal_a_sequential_cached_draft_chain(deep_target, settings):
    """Step s of root r is what decoding drafts from r: steps 1 to 7, 1e-5 of their scale, packed and padded."""
    module = eagle3(deep_target, **settings)
    perturb_norms(module)
    states, module.skips_rows = [], False
    module.objective = lambda reached, *_: states.extend(reached) or Pass(sum(x.sum() for x in reached), [], {})
    lengths = ((9, 7), (12,))
    batch = make_batch(lengths)
    list(module.passes(View.of(batch, deep_target, module.taps)))
    assert len(states) == 7

    drafter = module.drafter()
    for b, row in enumerate(lengths):
        slot = start = 0
        for n in row:
            ids = batch.tokens_BS[b : b + 1, start : start + n]
            streams = deep_target.features(ids, module.taps)
            taps = torch.cat([streams[tap] for tap in module.taps], -1)
            for root in range(n - 1):
                slots, context = drafter.new_state(1, 32), root + 1
                positions = torch.arange(context)[None]
                hidden = drafter.extend(slots, taps[:, :context], ids[:, 1 : context + 1], positions)[:, -1:]
                for step in range(min(7, n - 1 - root)):
                    if step:
                        token = ids[:, root + 1 + step : root + 2 + step]
                        hidden = drafter.step(slots, hidden, token, torch.tensor([[root + step]]))
                    expected = hidden[0, 0]
                    error = (states[step][b, slot + root] - expected).abs().max() / expected.abs().max()
                    assert error < 1e-5, (root, step)
            slot, start = slot + n - 1, start + n


def test_masked_reduction_does_not_depend_on_padding(deep_target):
    short, padded = make_batch(((9,),)), make_batch(((9,),))
    for name in ("tokens_BS", "valid_BS", "segment_BS", "position_BS", "answer_BS"):
        value = getattr(padded, name)
        fill = -1 if name == "segment_BS" else 0
        setattr(padded, name, F.pad(value, (0, 20), value=fill))
    from eaglelab.data.rows import compile_rows

    padded.rows = compile_rows(padded.valid_BS, padded.segment_BS, padded.position_BS, padded.answer_BS)
    losses = {}
    for reduction in ("masked", "pinned"):
        module = eagle3(deep_target, reduction=reduction)
        pair = [View.of(batch, deep_target, module.taps) for batch in (short, padded)]
        losses[reduction] = [float(next(iter(module.passes(view))).loss) for view in pair]
    assert losses["masked"][0] == pytest.approx(losses["masked"][1], rel=1e-5)
    assert losses["pinned"][0] > 2 * losses["pinned"][1]


def test_gradient_flows_through_every_step(deep_target):
    """With all weight on the last step's loss, the fusion still learns."""
    module = eagle3(deep_target, decay=1.0)
    module.step_weights = lambda: torch.eye(7)[6]
    (one,) = module.passes(View.of(make_batch(((14,),)), deep_target, module.taps))
    one.loss.backward()
    assert module.network.fc.weight.grad.abs().max() > 0


@pytest.mark.parametrize("settings", [{}, {"recurrence": "post_norm", "fc_norm": True}, {"draft_vocab_size": 40}])
@pytest.mark.parametrize("detach", [True, False])
def test_gradients_are_those_of_plain_chains(deep_target, detach, settings):
    """Cut between steps or not, against autograd over chains written out root by root; the two settings differ."""
    lengths = ((9, 7), (12,))
    batch = make_batch(lengths)
    module = eagle3(deep_target, detach=detach, steps=4, **settings)
    perturb_norms(module)
    view = View.of(batch, deep_target, module.taps)
    (one,) = module.passes(view)
    one.loss.backward()
    ours = [p.grad for p in module.network.parameters()]

    network, normed, plain = module.network, "recurrence" in settings, {}
    for setting in (True, False):
        (states, _), loss = chain_states(module, batch, lengths, 4, detach=setting), 0.0
        for step, reached in enumerate(states):
            teacher, counted = view.teacher(step), view.rows.supervised_at(step)
            rows, terms = [key for key in reached if counted[key]], []
            for key in rows:
                logits = deep_target.lm_head(teacher[key])
                if network.ids_K is not None:
                    if logits.argmax() not in network.ids_K:
                        continue
                    logits = logits[network.ids_K]
                state = reached[key] if normed else network.norm(reached[key])
                terms.append(-(logits.softmax(-1) * network.lm_head(state).log_softmax(-1)).sum())
            assert len(rows) == int(counted.sum())
            loss = loss + 0.8**step * sum(terms) / len(terms)
        assert detach != setting or float(loss) == pytest.approx(float(one.loss), rel=1e-5)
        plain[setting] = gradients(network, loss)
    assert_same_gradients(ours, plain[detach])
    differences = [(a - b).abs().max() / b.abs().max() for a, b in zip(*plain.values(), strict=True)]
    assert max(differences) > 0.05


@pytest.mark.parametrize("taps", [[5], [1, 6], [2, 4, 5], [7, 0, 3, 5, "final"]])
def test_any_number_of_taps_trains_and_decodes(deep_target, taps, tmp_path):
    """One to five streams, from the training step through the run folder to the decoding engine."""
    module = eagle3(deep_target, taps=taps, steps=2, fc_norm=len(taps) == 5)
    assert module.network.fc.in_features == 32 * len(taps)
    before = module.network.fc.weight.detach().clone()
    fit = trainer(2)
    fit.fit(module, loader([make_batch()] * 2))
    moved = (module.network.fc.weight - before).abs().view(32, len(taps), 32).amax((0, 2))
    assert (moved > 0).all()  # every stream is read

    folder = RunFolder(tmp_path)
    module.manifest().save(folder.manifest_path)
    (tmp_path / "checkpoints").mkdir()
    fit.save_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert folder.manifest().taps == tuple(taps)
    assert folder.manifest().drafter["num_taps"] == len(taps)
    drafter = folder.load_drafter(deep_target)
    assert drafter.taps == tuple(taps)
    prompt = [5, 9, 44, 2, 17]
    result = Engine(deep_target, drafter, Chain(4)).generate_one(prompt, max_new_tokens=20, stop_ids=set())
    plain = Engine(deep_target, None, make_tree("none")).generate_one(prompt, max_new_tokens=20, stop_ids=set())
    assert result.tokens == plain.tokens


def test_taps_of_another_run_are_refused(deep_target):
    saved = eagle3(deep_target, taps=[2, 4]).manifest()
    for other in ([4, 2], [2, 5], [2, 4, 5]):
        with pytest.raises(ManifestMismatch, match="field taps was recorded as"):
            require_same_contract(saved, eagle3(deep_target, taps=other))


def test_taps_are_the_published_addresses_and_never_collide(deep_target, target):
    assert eagle3(deep_target).taps == (2, 4, 5)
    assert eagle3(target, taps=[0, 1, 2]).taps == (0, 1, 2)
    with pytest.raises(ValueError, match="taps"):
        eagle3(target)  # three layers


def test_head_options(deep_target):
    module = eagle3(deep_target, head_init="target_rows", draft_vocab_size=10, train_head=False)
    ids = module.network.ids_K
    assert module.network.lm_head.weight.equal(deep_target.head_weight[ids])
    (one,) = module.passes(View.of(make_batch(), deep_target, module.taps))
    one.loss.backward()
    assert module.network.lm_head.weight.grad is None
    assert module.network.norm.weight.grad is not None


def test_rows_count_only_when_the_target_s_argmax_can_be_drafted(deep_target):
    module = eagle3(deep_target, draft_vocab_size=30)
    view = View.of(make_batch(((20,),)), deep_target, module.taps)
    (one,) = module.passes(view)
    best = deep_target.lm_head(view.teacher().flatten(0, 1)[view.rows.supervised_M]).argmax(-1)
    assert one.means["argmax_coverage"] == pytest.approx(float((best < 30).float().mean()))
    assert 0 < one.means["argmax_coverage"] < 1


def test_coverage_is_counted_over_the_training_and_survives_a_resume(deep_target, tmp_path):
    """Every supervised row seen, once, by its target argmax; exact counts in the report."""
    batches = [make_batch(seed=seed, lengths=((7 + seed,), (12,))) for seed in (0, 1, 2, 2)]
    covered = rows = 0
    for batch in batches:
        view = View.of(batch, deep_target, ("final",))
        best = deep_target.lm_head(view.teacher().flatten(0, 1)[batch.rows.supervised_M]).argmax(-1)
        covered, rows = covered + int((best < 30).sum()), rows + best.numel()
    expected = {"covered": covered, "supervised_rows": rows, "share": covered / rows}
    assert 0 < covered < rows

    whole = eagle3(deep_target, draft_vocab_size=30, steps=3)
    trainer(4).fit(whole, loader(batches))
    assert whole.report["argmax_coverage"] == expected
    counts = torch.arange(61, 0, -1)
    assert whole.report["answer_token_coverage"] == pytest.approx(float(counts[:30].sum() / counts.sum()))

    first = trainer(2)
    first.fit(eagle3(deep_target, draft_vocab_size=30, steps=3), loader(batches[:2]))
    first.save_checkpoint(tmp_path / "half.ckpt")
    second = eagle3(deep_target, draft_vocab_size=30, steps=3)
    second.on_load_checkpoint(torch.load(tmp_path / "half.ckpt", weights_only=True))  # the job looks first
    fit = trainer(4, max_epochs=9)
    fit.fit(second, loader(batches[3:] * 4), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert fit.global_step == 4
    assert second.report["argmax_coverage"] == expected


def test_no_coverage_is_reported_for_the_whole_vocabulary(deep_target):
    module = eagle3(deep_target, steps=2)
    trainer(1).fit(module, loader([make_batch()]))
    assert module.report == {}


def test_vocabulary_is_sorted_by_id_and_takes_the_most_frequent():
    counts = torch.tensor([5, 0, 9, 1, 9, 0, 2])
    vocabulary = DraftVocabulary.most_frequent(counts, 4)
    assert vocabulary.ids_K.tolist() == [0, 2, 4, 6]
    assert vocabulary.d2t.tolist() == [0, 1, 2, 3]  # offsets: 0+0, 1+1, 2+2, 3+3
    assert vocabulary.t2d.tolist() == [True, False, True, False, True, False, True]
    assert vocabulary.coverage(counts) == pytest.approx(25 / 26)
    assert DraftVocabulary.most_frequent(counts, 6).ids_K.tolist() == [0, 1, 2, 3, 4, 6]  # unseen: the lower id
    assert vocabulary.digest != DraftVocabulary.most_frequent(counts, 5).digest
    for size in (0, 8):
        with pytest.raises(ValueError, match="between 1 and"):
            DraftVocabulary.most_frequent(counts, size)
    with pytest.raises(ValueError, match="ascend"):
        DraftVocabulary(torch.tensor([3, 1]), 7)


@pytest.mark.parametrize(("damage", "message"), [("absolute", "absolute ids"), ("rebuilt", "one was replaced")])
def test_a_head_and_its_map_are_loaded_together_or_not_at_all(deep_target, damage, message):
    module = eagle3(deep_target, draft_vocab_size=10)
    module.network.d2t += 3
    module.network.t2d.copy_(F.pad(torch.zeros(3), (0, 58)).bool().index_fill(0, module.network.ids_K, True))
    state = {k: v.clone() for k, v in module.network.state_dict().items()}
    FusedDrafter(module.drafter_config).load_state_dict(state)  # consistent: fine
    state["d2t"] = module.network.ids_K if damage == "absolute" else state["d2t"] + 1
    with pytest.raises(ValueError, match=message):
        FusedDrafter(module.drafter_config).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recurrence": "normed"}, "recurrence='normed' is not one of pre_norm, post_norm"),
        ({"taps": []}, "names no stream"),
        ({"taps": [2, 2]}, "name one feature twice"),
        ({"taps": [2, 8]}, "tap 8 is not a feature address of a target with 8 layers"),
        ({"taps": [-1]}, "tap -1 is not a feature address"),
        ({"taps": [1.5]}, "tap 1.5 is not a feature address"),
        ({"steps": 0}, "takes 1 to 10"),
        ({"steps": 11}, "takes 1 to 10"),
        ({"reduction": "mean"}, "reduction='mean' is not one of masked, pinned"),
        ({"head_init": "zeros"}, "head_init='zeros' is not one of random, target_rows"),
        ({"draft_vocab_size": 1000}, "between 1 and the target's vocabulary of 61"),
    ],
)
def test_settings_that_make_no_sense(settings, message, deep_target):
    with pytest.raises(ValueError, match=message):
        eagle3(deep_target, **settings)


@pytest.mark.parametrize("detach", [False, True])
def test_checkpointed_steps_change_memory_only(deep_target, detach):
    """Same losses and gradients, and little is saved: a rollout of 7 steps keeps the MLP's products of none."""
    batch, found = make_batch(((30,), (21,)), answer_from=10), []
    for checkpoint_steps in (False, True):
        module = eagle3(deep_target, detach=detach, checkpoint_steps=checkpoint_steps)
        view, saved = View.of(batch, deep_target, module.taps), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.shape) or x, lambda x: x):
            (one,) = module.passes(view)
        one.loss.backward()
        products = sum(shape[-1] == module.drafter_config.intermediate_size for shape in saved)
        found.append((one.loss.detach(), [p.grad for p in module.network.parameters()], products))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert_same_gradients(found[1][1], found[0][1])
    assert found[0][2] >= 7
    assert found[1][2] == 0
