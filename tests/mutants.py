"""Seeded faults of training, one per trap, each with the test that must notice it.

Every mutant leaves all shapes as they were. ``apply`` changes the loaded package; the plugin at the end of the file
applies the one that ``--mutant NAME`` names before any test module is imported.
"""

from __future__ import annotations

import dataclasses
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

    View.teacher = lambda self, step=0: self.rows.gather(self.final_BSd, step)


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


def pytest_addoption(parser) -> None:
    parser.addoption("--mutant", help="apply this fault before the tests")


def pytest_configure(config) -> None:
    if name := config.getoption("--mutant"):
        MUTANTS[name].apply()
