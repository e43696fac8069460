"""Drafting: positions, visibility and order of tree nodes."""

from __future__ import annotations

import torch

from tests.mutants.registry import EAGLE3_CHAIN, change_forward, mutant

EXACT = "tests/decoding/test_exactness.py::test_networks_over_hundreds_of_prompts"


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


@mutant("pre-norm state fed back at decoding only", EAGLE3_CHAIN + "[eagle3.1]")
def decoding_recurs_pre_norm() -> None:
    from eaglelab.drafters import SlotDrafter

    def forward(self, state, tokens, position, attend):
        network = self.network
        return network.midlayer(state, self.target.embed(tokens), *network.rotary(position), attend)

    SlotDrafter._forward = forward


@mutant(
    "equal values: deeper nodes first", "tests/decoding/test_dynamic.py::test_equal_values_go_to_the_shallower_node"
)
def deeper_first() -> None:
    from eaglelab.decoding.policies import dynamic

    def last_of_equals(value_BM):
        return value_BM.shape[1] - 1 - value_BM.flip(1).argsort(dim=1, descending=True, stable=True)

    dynamic.best_first = last_of_equals
