"""What a training step of each variant consists of, as its cost sees it."""

from __future__ import annotations

import dataclasses
from functools import singledispatch

from eaglelab.variants.contract import Contract
from eaglelab.variants.eagle import EagleContract
from eaglelab.variants.eagle3 import Eagle3Contract
from eaglelab.variants.hass import HassContract


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The drafter's work on one micro-batch.

    Attributes:
        steps: forward passes over the rows; step ``s`` attends to the native keys and to ``s`` own ones.
        joint: gradients run through all steps, so that what all of them keep for the backward is in memory together;
            else each step is back-propagated before the next one, and they share keys alone (HASS).
        top_k: the loss has a top-K term.
        noise: noise is added to the input features.
        own_head: the drafter's own token head, else the target's frozen one.
        trains_head: the own head is trained.
        feature_loss: SmoothL1 on the features is part of the loss.
        checkpointed: of each step state, keys and values are kept, and the rest is computed again in the backward
            (``checkpoint_steps``).
        dense: scores of all pairs of rows are written out (``alignment=shipped``).
        share: part of the training that consists of such steps.
    """

    steps: int = 1
    joint: bool = True
    top_k: bool = False
    noise: bool = False
    own_head: bool = False
    trains_head: bool = False
    feature_loss: bool = True
    checkpointed: bool = False
    dense: bool = False
    share: float = 1.0


@singledispatch
def rollouts(contract: Contract) -> tuple[Rollout, ...]:
    """The kinds of step of a training, the last and costliest kind last; their shares add up to 1.

    A new variant registers its own: ``@rollouts.register``.

    Raises:
        ValueError: nobody said what a step of that variant consists of.
    """
    raise ValueError(
        f"no cost is known for {type(contract).__name__}: register what its step consists of with "
        "eaglelab.variants.rollout.rollouts.register"
    )


@rollouts.register
def _(contract: EagleContract) -> tuple[Rollout, ...]:
    return (Rollout(noise=contract.noise != "none"),)


@rollouts.register
def _(contract: HassContract) -> tuple[Rollout, ...]:
    last = Rollout(
        steps=contract.passes,
        joint=not contract.detach or contract.passes == 1,
        top_k=contract.top_weight != 0,
        noise=contract.noise != "none",
        dense=contract.alignment == "shipped",
        share=1 - contract.eagle_share,
    )
    if not contract.eagle_share:
        return (last,)
    return dataclasses.replace(last, steps=1, joint=True, top_k=False, share=contract.eagle_share), last


@rollouts.register
def _(contract: Eagle3Contract) -> tuple[Rollout, ...]:
    own = Rollout(
        steps=contract.steps,
        own_head=True,
        trains_head=contract.train_head,
        feature_loss=contract.feature_weight != 0,
    )
    return (own,)
