"""Which streams the drafter reads, and how they are fused."""

from __future__ import annotations

import dataclasses

import torch

from tests.mutants.registry import EAGLE_LOSS, mutant


@mutant("taps collide", "tests/target/test_features.py::test_default_taps")
def taps_collide() -> None:
    from eaglelab.target import taps

    taps.default_taps.__code__ = (lambda num_layers: (2, num_layers // 2, num_layers - 3)).__code__


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


FEATURES = "tests/target/test_features.py::test_features_embedding_and_head_are_the_models_own"


@mutant("taps one layer too high", FEATURES + "[llama]")
def taps_off_by_one() -> None:
    from eaglelab.target import FrozenTarget

    features = FrozenTarget.features

    def higher(self, tokens_BS, taps, **kw):
        moved = [tap if tap == "final" else min(tap + 1, self.num_layers - 1) for tap in taps]
        found = features(self, tokens_BS, tuple(dict.fromkeys(moved)), **kw)
        return {tap: found[other] for tap, other in zip(taps, moved, strict=True)}

    FrozenTarget.features = higher


@mutant("feature before the final norm for the one behind it", EAGLE_LOSS)
def feature_before_the_norm() -> None:
    from eaglelab.doctor.wiring import _last_stream
    from eaglelab.variants import View

    of = View.of.__func__

    def unnormed(cls, batch, target, *args):
        with _last_stream(target) as caught:
            view = of(cls, batch, target, *args)
        return dataclasses.replace(view, taps_BRF=batch.rows.gather(caught[-1]))

    View.of = classmethod(unnormed)


@mutant(
    "tied embeddings lost: the head is a copy that was never loaded",
    "tests/target/test_loading.py::test_shards_tied_heads_and_a_missing_tokenizer",
)
def tie_lost() -> None:
    from eaglelab.target import FrozenTarget

    init = FrozenTarget.__init__

    def untied(self, model, *args, **kw):
        head = model.get_output_embeddings()
        if model.config.tie_word_embeddings:
            head.weight = torch.nn.Parameter(torch.randn_like(head.weight) * head.weight.std())
        init(self, model, *args, **kw)

    FrozenTarget.__init__ = untied
