"""Noise and losses."""

from __future__ import annotations

import dataclasses

import torch

from tests.mutants.registry import EAGLE_LOSS, HASS_GOLDEN, mutant


@mutant("noise on the teacher", EAGLE_LOSS)
def noisy_teacher() -> None:
    from eaglelab.variants import View

    teacher = View.teacher
    View.teacher = lambda self, step=0: teacher(self, step) + torch.rand_like(teacher(self, step))


@mutant("renormalised top-K", HASS_GOLDEN + "[masked_nopad]")
def renormalised_top_k() -> None:
    from eaglelab.variants import HassModule

    init = HassModule.__init__
    HassModule.__init__ = lambda self, *args, **kw: init(self, *args, **kw | {"renormalise_top_k": True})


@mutant(
    "loss scale depends on padding", "tests/variants/test_eagle3.py::test_masked_reduction_does_not_depend_on_padding"
)
def scale_by_padding() -> None:
    from eaglelab.variants import Eagle3Module

    init = Eagle3Module.__init__
    Eagle3Module.__init__ = lambda self, *args, **kw: init(self, *args, **kw | {"reduction": "pinned"})


@mutant(
    "noise from the global random stream",
    "tests/variants/test_eagle.py::test_noise_has_a_random_stream_of_its_own",
)
def noise_from_the_global_stream() -> None:
    from eaglelab.variants import DraftingModule

    DraftingModule.generator = lambda self: torch.default_generator


@mutant(
    "noise scaled by the packed row, not by the sample",
    "tests/variants/test_eagle.py::test_length_scaled_noise_knows_the_sample_inside_a_packed_row",
)
def noise_of_the_packed_row() -> None:
    from eaglelab.variants import View

    View.sample_length = lambda self: torch.full_like(self.rows.position_BR, self.tokens_BS.shape[1])


@mutant("noise in validation too", "tests/variants/test_eagle.py::test_noise_touches_inputs_only_and_training_only")
def noise_in_validation() -> None:
    from eaglelab.variants import EagleModule, View

    of, init = View.of.__func__, EagleModule.__init__
    scale = []

    def noting(self, *args, **kw):
        init(self, *args, **kw)
        scale.append(0.0 if self.contract.noise == "none" else self.contract.noise_scale)

    def noisy(cls, *args):
        view = of(cls, *args)
        return dataclasses.replace(view, taps_BRF=view.taps_BRF + scale[-1] * torch.randn_like(view.taps_BRF))

    EagleModule.__init__, View.of = noting, classmethod(noisy)


@mutant(
    "mean over the width of a feature forgotten",
    "tests/objectives/test_objectives.py::test_smooth_l1_is_averaged_over_the_width_and_summed_over_rows",
)
def regression_summed_over_the_width() -> None:
    from eaglelab import objectives
    from eaglelab.objectives import regression
    from eaglelab.variants import eagle

    mean = regression.smooth_l1

    def summed(predicted_Md, feature_Md, **kw):
        return mean(predicted_Md, feature_Md, **kw) * predicted_Md.shape[-1]

    objectives.smooth_l1 = regression.smooth_l1 = eagle.smooth_l1 = summed
