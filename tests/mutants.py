"""Seeded faults of training and decoding, one per trap, each with the test that must notice it.

Every mutant leaves all shapes as they were. ``apply`` changes the loaded package; the plugin at the end of the file
applies the one that ``--mutant NAME`` names before any test module is imported.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable

import torch

EAGLE_LOSS = "tests/variants/test_eagle.py::test_loss_is_the_two_published_terms"
HASS_CHAIN = "tests/variants/test_hass.py::test_passes_equal_a_sequential_cached_draft_chain"
EAGLE3_CHAIN = "tests/variants/test_eagle3.py::test_steps_equal_a_sequential_cached_draft_chain"
ORACLE = "tests/drafters/test_attention.py::test_values_and_gradients_equal_the_oracle"
INFLUENCE = "tests/drafters/test_attention.py::test_perturbing_one_key_moves_exactly_the_rows_that_may_see_it"
HASS_GOLDEN = "tests/variants/test_hass.py::test_golden_three_passes"


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    trap: str
    killed_by: str
    apply: Callable[[], None]


MUTANTS: dict[str, Mutant] = {}


def mutant(trap: str, killed_by: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(apply: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[apply.__name__] = Mutant(apply.__name__, trap, killed_by, apply)
        return apply

    return register


def replace_default(function: Callable, **defaults: object) -> None:
    assert function.__kwdefaults__ is not None and defaults.keys() <= function.__kwdefaults__.keys()
    function.__kwdefaults__ |= defaults


@mutant("features shifted by one row", EAGLE_LOSS)
def feature_shift() -> None:
    from eaglelab.variants import View

    of = View.of.__func__

    def shifted(cls, *args):
        view = of(cls, *args)
        return dataclasses.replace(view, taps_BRF=view.taps_BRF.roll(1, dims=1))

    View.of = classmethod(shifted)


@mutant("advanced tokens shifted by one row", EAGLE_LOSS)
def token_shift() -> None:
    from eaglelab.variants import View

    View.embedding = lambda self, step=0: self.target.embed(self.rows.gather(self.tokens_BS, step))


@mutant("targets shifted by one row", EAGLE_LOSS)
def target_shift() -> None:
    from eaglelab.variants import View

    View.teacher = lambda self, step=0: self.rows.gather(self.teacher_BSw, step)


@mutant("loss mask shifted by one row", EAGLE_LOSS)
def supervision_shift() -> None:
    from eaglelab.data import rows

    replace_default(rows.compile_rows, supervise="source")


@mutant(
    "loss mask of a rollout step not moved along",
    "tests/variants/test_hass.py::test_supervision_moves_with_the_predicted_row",
)
def rollout_supervision_stays() -> None:
    from eaglelab.data.rows import Rows

    Rows.supervised_slots = lambda self, step=0: self.supervised_M


@mutant("rotary position not advanced in the rollout", HASS_CHAIN)
def position_stays() -> None:
    from eaglelab.variants import View

    View.position = lambda self, step=0: self.rows.position_BR


@mutant("rotary position not advanced in the rollout", EAGLE3_CHAIN)
def position_stays_eagle3() -> None:
    position_stays()


@mutant("rope_theta ignored", "tests/drafters/test_feature.py::test_rope_base_comes_from_the_target_everywhere")
def rope_base_ignored() -> None:
    from eaglelab.drafters import DrafterConfig

    to_llama = DrafterConfig.to_llama

    def fixed(self):
        config = to_llama(self)
        config.rope_parameters["rope_theta"] = 10000.0
        return config

    DrafterConfig.to_llama = fixed


def change_visibility(change: Callable) -> None:
    from eaglelab.data.rows import Rows

    visible = Rows.visible
    Rows.visible = lambda self: change(self, visible(self))


@mutant("future rows visible", INFLUENCE)
def future_visible() -> None:
    def same_segment(rows, visible):
        same = rows.segment_BR[:, :, None] == rows.segment_BR[:, None, :]
        return visible | (same & rows.legal_BR[:, None])

    change_visibility(same_segment)


@mutant("other segments visible", INFLUENCE)
def segments_visible() -> None:
    change_visibility(lambda rows, visible: visible | torch.ones_like(visible).tril())


@mutant("padding visible", ORACLE)
def padding_visible() -> None:
    change_visibility(lambda rows, visible: visible | ~rows.legal_BR[:, None, :])


@mutant("draft states of siblings visible", INFLUENCE)
def sibling_visible() -> None:
    from eaglelab.drafters import RolloutContext

    spread = RolloutContext._spread_keys

    def neighbour(self, q):
        k, v, own_k, own_v = spread(self, q)
        return k, v, own_k, own_v.roll(1, dims=2)

    RolloutContext._spread_keys = neighbour


@mutant("own ancestors forgotten", HASS_CHAIN)
def ancestors_forgotten() -> None:
    from eaglelab.drafters import RolloutContext

    add = RolloutContext.add_own

    def only_newest(self, k, v):
        self._own.clear()
        add(self, k, v)

    RolloutContext.add_own = only_newest


@mutant("softmax over scores masked by zero", HASS_GOLDEN + "[masked_pad]")
def masked_by_zero() -> None:
    from eaglelab.variants import hass

    hass.RolloutContext = lambda rows: hass.ShippedContext(rows, rows.source_BR.shape[1] + 1)


@mutant("renormalised top-K", HASS_GOLDEN + "[masked_nopad]")
def renormalised_top_k() -> None:
    from eaglelab.variants import HassModule

    init = HassModule.__init__
    HassModule.__init__ = lambda self, *args, **kw: init(self, *args, **kw | {"renormalise_top_k": True})


@mutant("spliced states not detached", HASS_GOLDEN + "[masked_nopad]")
def not_detached() -> None:
    # a graph kept alive and run through twice gives other gradients
    torch.Tensor.detach = lambda self: self
    backward = torch.Tensor.backward
    torch.Tensor.backward = lambda self, *a, **kw: backward(self, *a, **kw | {"retain_graph": True})


@mutant(
    "gradient cut between steps of the training-time test", "tests/variants/test_eagle3.py::test_golden_seven_steps"
)
def detached_steps() -> None:
    from eaglelab.drafters import FusedDrafter

    forward = FusedDrafter.forward
    FusedDrafter.forward = lambda self, state, *rest: forward(
        self, state.detach() if rest[1].min() > 0 else state, *rest
    )


@mutant(
    "post-norm state fed back",
    EAGLE3_CHAIN.replace("steps_equal_a_sequential_cached_draft_chain", "golden_seven_steps"),
)
def post_norm_recurrence() -> None:
    from eaglelab.drafters import FusedDrafter

    forward = FusedDrafter.forward
    FusedDrafter.forward = lambda self, *args: self.norm(forward(self, *args))


@mutant(
    "loss scale depends on padding", "tests/variants/test_eagle3.py::test_masked_reduction_does_not_depend_on_padding"
)
def scale_by_padding() -> None:
    from eaglelab.variants import Eagle3Module

    init = Eagle3Module.__init__
    Eagle3Module.__init__ = lambda self, *args, **kw: init(self, *args, **kw | {"reduction": "pinned"})


@mutant(
    "d2t written as absolute ids",
    "tests/variants/test_eagle3.py::test_vocabulary_is_sorted_by_id_and_takes_the_most_frequent",
)
def absolute_d2t() -> None:
    from eaglelab.data.draft_vocabulary import DraftVocabulary

    DraftVocabulary.d2t = property(lambda self: self.ids_K)


@mutant(
    "map replaced under a loaded head",
    "tests/variants/test_eagle3.py::test_a_head_and_its_map_are_loaded_together_or_not_at_all",
)
def map_rebuilt() -> None:
    from eaglelab.drafters import DraftNetwork, FusedDrafter

    FusedDrafter.load_state_dict = DraftNetwork.load_state_dict


@mutant("taps collide", "tests/target/test_features.py::test_default_taps")
def taps_collide() -> None:
    from eaglelab.target import taps

    taps.default_taps.__code__ = (lambda num_layers: (2, num_layers // 2, num_layers - 3)).__code__


@mutant("non-strict load", "tests/cli/test_evaluate.py::test_a_checkpoint_without_a_tensor_is_refused")
def non_strict() -> None:
    from torch import nn

    load = nn.Module.load_state_dict
    nn.Module.load_state_dict = lambda self, state, strict=True, assign=False: load(self, state, False, assign)


@mutant(
    "clip by value taken for clip by norm",
    "tests/variants/test_eagle.py::test_clipping_by_value_is_not_clipping_by_norm",
)
def clip_confused() -> None:
    from eaglelab.variants import DraftingModule

    clip = DraftingModule.clip_gradients
    DraftingModule.clip_gradients = lambda self, *a, **kw: clip(self, *a, **kw | {"gradient_clip_algorithm": "norm"})


@mutant("gradient accumulation wiped", "tests/variants/test_eagle.py::test_accumulation_equals_one_larger_batch")
def accumulation_wiped() -> None:
    from eaglelab.variants import DraftingModule

    step = DraftingModule.training_step

    def wiping(self, batch, batch_idx):
        self.network.zero_grad()
        return step(self, batch, batch_idx)

    DraftingModule.training_step = wiping


@mutant("warm-up advanced too often", "tests/variants/test_optim.py::test_scheduler_advances_once_per_optimizer_step")
def warm_up_twice() -> None:
    from torch.optim.lr_scheduler import LambdaLR

    step = LambdaLR.step
    LambdaLR.step = lambda self: (step(self), step(self))[0]


@mutant("target left in train mode", EAGLE_LOSS)
def target_trains() -> None:
    from torch import nn

    from eaglelab.target import FrozenTarget

    FrozenTarget.train = nn.Module.train
    init = FrozenTarget.__init__

    def waking(self, *args, **kw):
        init(self, *args, **kw)
        self.train()

    FrozenTarget.__init__ = waking


@mutant("noise on the teacher", EAGLE_LOSS)
def noisy_teacher() -> None:
    from eaglelab.variants import View

    teacher = View.teacher
    View.teacher = lambda self, step=0: teacher(self, step) + torch.rand_like(teacher(self, step))


@mutant(
    "empty batch still decays the weights",
    "tests/variants/test_eagle.py::test_empty_plan_changes_nothing_not_even_by_weight_decay",
)
def empty_batch_steps() -> None:
    from eaglelab.variants import DraftingModule

    step = DraftingModule.training_step

    def always(self, batch, batch_idx):
        step(self, batch, batch_idx)
        if batch.rows.num_supervised == 0:
            for p in self.network.parameters():
                p.grad = torch.zeros_like(p)
            self._update()

    DraftingModule.training_step = always


# ---- decoding --------------------------------------------------------------------------------------------------

COMMITTED = "tests/decoding/test_batch.py::test_committed_state_of_every_sequence_equals_a_fresh_prefill"
BATCHES = "tests/decoding/test_batch.py::test_a_batch_gives_the_results_of_single_runs"
EXACT = "tests/decoding/test_exactness.py::test_networks_over_hundreds_of_prompts"
FRESH = "tests/decoding/test_transaction.py::test_state_after_every_round_equals_a_fresh_prefill"
INTERRUPT = "tests/decoding/test_transaction.py::test_an_interrupt_on_any_line_leaves_the_committed_state_usable"
SAME_TEXT = "tests/decoding/test_sampling.py::test_sampled_text_is_that_of_plain_sampling"
SCORES = "tests/decoding/test_sampling.py::test_processed_scores_are_the_librarys"
LAW = "tests/decoding/test_statistics.py::test_sampled_text_has_the_law_of_the_target"


@mutant("frontier K/V published as if verified", FRESH + "[noisy-static]")
def frontier_published() -> None:
    from eaglelab.target import KVSlots

    commit = KVSlots.commit

    def one_more(self, rows, counts):
        commit(self, rows, counts)
        if rows is not None:
            self.lengths = [length + 1 for length in self.lengths]

    KVSlots.commit = one_more


@mutant("rows committed by token id", "tests/decoding/test_engine.py::test_three_tokens_cannot_be_confused")
def rows_by_token() -> None:
    from eaglelab.decoding import engine, verify

    follow = verify.follow

    def first_of_its_token(chosen_BR, flat):
        decision = follow(chosen_BR, flat)
        tokens_BL = flat.tokens_BR.gather(1, decision.rows_BL)
        same_BLR = flat.tokens_BR[:, None] == tokens_BL[..., None]
        rows_BL = (same_BLR * torch.arange(flat.rows, 0, -1)).argmax(-1)
        return dataclasses.replace(decision, rows_BL=rows_BL)

    engine.follow = verify.follow = first_of_its_token


@mutant(
    "end token inside a path ignored", "tests/decoding/test_engine.py::test_nothing_after_an_end_token_is_published[3]"
)
def end_token_inside() -> None:
    from eaglelab.decoding.state import Request

    admit = Request.admit

    def only_last(self, candidates):
        stops = self.stop_ids
        self.stop_ids = stops if candidates[-1] in stops else frozenset()
        try:
            return admit(self, candidates)
        finally:
            self.stop_ids = stops

    Request.admit = only_last


@mutant(
    "unpublished draft tokens counted as accepted",
    "tests/decoding/test_engine.py::test_max_new_tokens_is_exact_inside_a_path[3-perfect]",
)
def unpublished_counted() -> None:
    from eaglelab.decoding.state import Request

    admit = Request.admit
    Request.admit = lambda self, candidates: dataclasses.replace(admit(self, candidates), accepted=len(candidates) - 1)


def change_forward(owner: object, name: str, change: Callable) -> None:
    """`change(forward, target, ...)` stands for the target's forward while `owner.name` runs: no self-check sees it."""
    from eaglelab.target import FrozenTarget

    inside, work, forward = [], getattr(owner, name), FrozenTarget.forward_rows

    def working(*args, **kw):
        inside.append(True)
        try:
            return work(*args, **kw)
        finally:
            inside.pop()

    setattr(owner, name, working)
    FrozenTarget.forward_rows = lambda *args, **kw: change(forward, *args, **kw) if inside else forward(*args, **kw)


@mutant("tree positions off by one", EXACT + "[feature-static]")
def tree_position_off() -> None:
    from eaglelab.decoding import Engine

    def one_more(forward, target, tokens_BN, position_BN, *args, **kw):
        return forward(target, tokens_BN, position_BN + (position_BN > position_BN[:, :1]), *args, **kw)

    change_forward(Engine, "round", one_more)


@mutant("tree positions by row, not by depth", EXACT + "[feature-dynamic]")
def tree_position_by_row() -> None:
    from eaglelab.decoding import Engine

    def by_row(forward, target, tokens_BN, position_BN, *args, **kw):
        return forward(target, tokens_BN, position_BN[:, :1] + torch.arange(tokens_BN.shape[1]), *args, **kw)

    change_forward(Engine, "round", by_row)


@mutant("siblings visible in the tree", EXACT + "[fused-dynamic]")
def tree_siblings_visible() -> None:
    from eaglelab.decoding import FlatTree

    def mask(self):
        tree = self.topology
        if tree.chain:
            return None
        same_BRR = tree.depth_BR[:, :, None] == tree.depth_BR[:, None, :]
        return (tree.ancestor_BRR | same_BRR).expand(self.tokens_BR.shape[0], -1, -1)

    FlatTree.mask_BRR = property(mask)


@mutant("logits of a padding row for a short prompt", BATCHES + "[chain-greedy]")
def padding_row_answers() -> None:
    from eaglelab.decoding import engine

    def last_of_all(forward, target, *args, **kw):
        output = forward(target, *args, **kw | {"logits": "all"})
        output.logits_BNV = output.logits_BNV[:, -1:]
        return output

    change_forward(engine, "prefill", last_of_all)


@mutant("draft rows of rejected nodes kept", COMMITTED + "[static]")
def rejected_draft_rows_kept() -> None:
    from eaglelab.drafters import SlotDrafter

    def keep(self, state):
        state.lengths = [length + state.provisional for length in state.lengths]
        state.provisional = 0

    SlotDrafter.discard = keep
    SlotDrafter.truncate = lambda self, state, lengths: None


@mutant("draft rows not truncated after an interrupt", INTERRUPT)
def draft_rows_twice() -> None:
    from eaglelab.decoding import Engine

    init = Engine.__init__

    def without_truncate(self, target, drafter=None, *args, **kw):
        init(self, target, drafter, *args, **kw)
        if drafter is not None:
            drafter.truncate = lambda state, lengths: None

    Engine.__init__ = without_truncate


@mutant("commit left half done by an interrupt", INTERRUPT)
def commit_half_done() -> None:
    from eaglelab.decoding.transaction import Transaction

    Transaction.__exit__ = lambda self, *error: self._drop_provisional()


@mutant("features of the leading rows, not of the accepted ones", FRESH + "[noisy-static]")
def features_of_leading_rows() -> None:
    from eaglelab.decoding import transaction

    transaction._gather_rows = lambda values_BRF, rows_BA: values_BRF[:, : rows_BA.shape[1]]


@mutant("target rows mixed up when a sequence leaves", BATCHES + "[chain-greedy]")
def rows_mixed_up() -> None:
    from eaglelab.target import kv

    kv.moves = lambda order: []


@mutant("draft rows mixed up when a sequence leaves", COMMITTED + "[static]")
def draft_rows_mixed_up() -> None:
    from eaglelab.drafters import runtime

    runtime.moves = lambda order: []


@mutant("draft rows to add mixed up when a sequence leaves", COMMITTED + "[dynamic]")
def pending_mixed_up() -> None:
    from eaglelab.decoding.state import DraftRows

    select = DraftRows.select

    def leading(self, order):
        chosen = select(self, order)
        return dataclasses.replace(chosen, features_BNF=self.features_BNF[: len(order)])

    DraftRows.select = leading


@mutant(
    "drafting past the last position",
    "tests/decoding/test_engine.py::test_drafting_stops_before_the_last_position[chain-drafter]",
)
def drafts_past_the_end() -> None:
    from eaglelab.decoding import Engine

    init = Engine.__init__

    def unlimited(self, target, drafter=None, *args, **kw):
        init(self, target, drafter, *args, **kw)
        if drafter is not None:
            drafter.max_positions = 10**9

    Engine.__init__ = unlimited


@mutant(
    "draft positions not advanced",
    "tests/decoding/test_feature_drafter.py::test_drafted_tokens_and_values_are_the_sequential_ones[static]",
)
def draft_position_stays() -> None:
    from eaglelab.drafters import SlotDrafter

    step = SlotDrafter.step
    SlotDrafter.step = lambda self, state, hidden, tokens, position, *rest: step(
        self, state, hidden, tokens, position - 1, *rest
    )


@mutant(
    "equal values: deeper nodes first", "tests/decoding/test_dynamic.py::test_equal_values_go_to_the_shallower_node"
)
def deeper_first() -> None:
    from eaglelab.decoding.policies import dynamic

    def last_of_equals(value_BM):
        return value_BM.shape[1] - 1 - value_BM.flip(1).argsort(dim=1, descending=True, stable=True)

    dynamic.best_first = last_of_equals


@mutant("one stream of numbers for all requests", "tests/decoding/test_sampling.py::test_one_seed_one_text")
def stream_shared() -> None:
    from eaglelab.decoding import state

    stream = state.Stream
    state.Stream = lambda seed: stream(0)


@mutant("numbers used up by rejected rows", SAME_TEXT + "[plain-chain-noisy]")
def numbers_used_up() -> None:
    from eaglelab.decoding.sampling import Stream

    at = Stream.at

    def next_ones(self, first, count):
        begin = getattr(self, "used", 0)
        self.used = begin + count
        return at(self, begin, count)

    Stream.at = next_ones


@mutant("repetition penalty without the root token", SCORES + "[greedy_penalty]")
def penalty_without_root() -> None:
    from eaglelab.decoding import sampling

    look_back = sampling._look_back

    def shorter(scores_RV, flat, b, prefix, processors):
        return look_back(
            scores_RV, dataclasses.replace(flat, tokens_BR=flat.tokens_BR.roll(1, 1)), b, prefix, processors
        )

    sampling._look_back = shorter


def break_rule(name: str) -> None:
    from tests.decoding.wrong_rules import WRONG

    WRONG[name].apply(types.SimpleNamespace(setattr=setattr))


@mutant("temperature skipped on the bonus token of a static tree", LAW + "[static]")
def bonus_unprocessed() -> None:
    break_rule("bonus token from the unprocessed distribution")


@mutant("temperature skipped on the bonus token of a sampled tree", LAW + "[sampled]")
def bonus_at_temperature_1() -> None:
    break_rule("temperature skipped after an accepted path")


@mutant("top-p before the temperature", SCORES + "[top_p]")
def top_p_first() -> None:
    break_rule("top-p before the temperature")


@mutant("q keeps the rejected child", LAW + "[sampled]")
def q_keeps_the_rejected() -> None:
    break_rule("q keeps the rejected child")


@mutant("empty residual becomes NaN", "tests/decoding/test_sampled.py::test_an_exhausted_residual_is_no_nan[dtype0]")
def residual_nan() -> None:
    from eaglelab.decoding import residual

    residual._reduce = lambda p_BV, q_BV: (p_BV - q_BV).clamp(min=0) / (p_BV - q_BV).clamp(min=0).sum(-1, keepdim=True)


@mutant("impossible token accepted", "tests/decoding/test_sampled.py::test_impossible_children_are_never_accepted")
def impossible_accepted() -> None:
    from eaglelab.decoding import residual

    residual._passes = lambda px_B, qx_B, u_B: u_B.double() * qx_B <= px_B


@mutant(
    "normed state normed again by the head",
    "tests/drafters/test_fused.py::test_a_normed_state_recurs_and_is_not_normed_again",
)
def normed_twice() -> None:
    from eaglelab.drafters import FusedDrafter

    FusedDrafter.head_input = lambda self, state: self.norm(state)


@mutant(
    "normed state fed back in training, head trained on it normed again",
    "tests/variants/test_eagle3.py::test_gradients_are_those_of_plain_chains[False-settings1]",
)
def normed_twice_in_the_loss() -> None:
    normed_twice()


@mutant("pre-norm state fed back at decoding only", EAGLE3_CHAIN + "[eagle3.1]")
def decoding_recurs_pre_norm() -> None:
    from eaglelab.drafters import SlotDrafter

    def forward(self, state, tokens, position, attend):
        network = self.network
        return network.midlayer(state, self.target.embed(tokens), *network.rotary(position), attend)

    SlotDrafter._forward = forward


@mutant(
    "one norm over all streams instead of one each",
    "tests/drafters/test_fused.py::test_fc_norm_norms_each_stream_by_itself",
)
def one_norm_before_fc() -> None:
    from eaglelab.drafters import FusedDrafter

    def fuse(self, taps):
        weight = torch.cat([norm.weight for norm in self.fc_norm])
        return self.fc(torch.nn.functional.rms_norm(taps, taps.shape[-1:], weight, self.config.rms_norm_eps))

    FusedDrafter.fuse = fuse


HARD_LABELS = "tests/variants/test_eagle.py::test_hard_labels_distil_the_token_two_ahead"


@mutant("hard label is the token that the row reads", HARD_LABELS)
def label_shift() -> None:
    from eaglelab.variants import View

    View.label = lambda self, step=0: self.rows.gather(self.tokens_BS, 1 + step)


@mutant("hard rows without their label", HARD_LABELS)
def label_beyond_the_segment() -> None:
    from eaglelab.variants import DraftingModule, EagleModule

    EagleModule.supervised = DraftingModule.supervised


@mutant(
    "hard label not moved along with the pass",
    "tests/variants/test_hass.py::test_gradients_are_those_of_plain_chains[True-hard]",
)
def label_stays() -> None:
    from eaglelab.variants import View

    View.label = lambda self, step=0: self.rows.gather(self.tokens_BS, 2)


@mutant(
    "states detached although the switch is off",
    "tests/variants/test_hass.py::test_gradients_are_those_of_plain_chains[False-soft]",
)
def always_detached() -> None:
    from eaglelab.variants import HassModule

    forward = HassModule._forward
    HassModule._forward = lambda self, older, newest, view: forward(self, older, newest.detach(), view)


@mutant(
    "states not detached although the switch is on",
    "tests/variants/test_eagle3.py::test_gradients_are_those_of_plain_chains[True-settings0]",
)
def never_detached() -> None:
    from eaglelab.variants import Eagle3Module

    init = Eagle3Module.__init__
    Eagle3Module.__init__ = lambda self, *args, **kw: init(self, *args, **kw | {"detach": False})


@mutant(
    "mean of micro-batch means",
    "tests/training/test_measures.py::test_four_uneven_micro_batches_log_what_one_batch_logs",
)
def mean_of_means() -> None:
    from eaglelab.variants import base
    from eaglelab.variants.measures import mean

    update = base.RowMeans.update

    def averaged(self, terms, measures):
        update(self, [(mean(x), 1) for x in terms], {name: (mean(x), 1) for name, x in measures.items()})

    base.RowMeans.update = averaged


@mutant("only the last micro-batch is logged", "tests/training/test_measures.py::test_row_means_by_hand")
def last_micro_batch() -> None:
    from eaglelab.variants.measures import RowMeans

    update = RowMeans.update

    def forgetful(self, *args):
        self.reset()
        update(self, *args)

    RowMeans.update = forgetful


@mutant(
    "coverage counted at every step",
    "tests/variants/test_eagle3.py::test_coverage_is_counted_over_the_training_and_survives_a_resume",
)
def coverage_by_step() -> None:
    from eaglelab.variants import Eagle3Module

    def observe(self, measures):
        for name, measure in measures.items():
            if name.startswith("argmax_coverage"):
                self.coverage.update(*measure)

    Eagle3Module.observe = observe


@mutant(
    "a checkpoint without a switch is taken for another setting",
    "tests/variants/test_manifest.py::test_old_checkpoints_continue_with_the_defaults",
)
def no_defaults() -> None:
    from eaglelab.variants import manifest

    manifest.with_defaults = lambda saved, module: saved


STORE = "tests/features/test_store.py::"


@mutant(
    "stored features shifted by one token",
    STORE + "test_batches_are_those_of_the_rows_online_with_the_targets_features[True]",
)
def stored_feature_shift() -> None:
    from eaglelab.features.store import FeatureStore

    read = FeatureStore.read

    def shifted(self, *args):
        return {name: part.roll(1, 0) for name, part in read(self, *args).items()}

    FeatureStore.read = shifted


@mutant("a store of another target reused", STORE + "test_another_targets_store_is_refused")
def any_store() -> None:
    from eaglelab.features.store import FeatureStore

    FeatureStore.require = lambda self, target, taps: None


@mutant(
    "an unfinished shard taken for a finished one",
    "tests/features/test_writer.py::test_a_damaged_shard_is_written_again",
)
def trusted_shards() -> None:
    from eaglelab.features.writer import StoreWriter

    StoreWriter._is_whole = lambda self, shard: (self.out / shard.file).is_file()


def pytest_addoption(parser) -> None:
    parser.addoption("--mutant", help="apply this fault before the tests")


def pytest_configure(config) -> None:
    if name := config.getoption("--mutant"):
        MUTANTS[name].apply()
