"""Which experts of a mixture-of-experts target a forward pass touches.

For a dense target more tree rows read the same weights. For a mixture of experts they read the union of the experts
that the rows are routed to, so a wide tree costs more weight traffic than its root alone (article, section 0x09A).

Letters: B sequences, N rows of a forward pass, k experts of a row, L mixture layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eaglelab.target.frozen import FrozenTarget


@dataclass(frozen=True)
class ExpertUnion:
    """Distinct routed experts per mixture layer; experts that serve every row ("shared") do not count.

    layers: decoder layer of each mixture layer, from 0.
    experts: how many routed experts that layer has.
    union_BL: int64, experts touched by all real rows of a sequence.
    root_BL: int64, experts touched by row 0 alone, as in a step without a tree; 0 where row 0 is padding.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    union_BL: Tensor
    root_BL: Tensor

    def to_host(self) -> tuple[list[list[int]], list[list[int]]]:
        """`union_BL` and `root_BL` as lists; waits for the device, once."""
        union_BL, root_BL = torch.stack([self.union_BL, self.root_BL]).tolist()
        return union_BL, root_BL


@dataclass(frozen=True)
class MoEBlock:
    """A mixture layer's router and experts, and how many there are."""

    layer: int
    router: nn.Module
    experts: nn.Module
    count: int


class ExpertWatch:
    """Listens to a target's routers while it is entered.

        with ExpertWatch(target) as watch:
            target.forward_rows(...)
        seen = watch.union(real_BN)

    It keeps the latest forward pass only, until it is asked or entered again, and none that an exception ended; it may
    stay open for a whole generation. For a dense target nothing is hooked and `union` returns None.

    Raises:
        ValueError: a mixture layer whose number of experts cannot be told.
    """

    def __init__(self, target: FrozenTarget) -> None:
        self.blocks = find_blocks(target)
        self._decoder = target._wiring.decoder
        self._hooks: ExitStack | None = None
        self._rows: tuple[int, int] | None = None
        self._chosen: dict[int, Tensor] = {}  # place in blocks -> expert of each row, [B * N, k]

    @staticmethod
    def supported(target: FrozenTarget) -> bool:
        """True if the target has routers to listen to.

        False for dense targets, and for families without a router beside their experts (JetMoE).
        """
        return bool(find_blocks(target))

    def __enter__(self) -> ExpertWatch:
        assert self._hooks is None, "this watch is entered already"
        self._forget()
        with ExitStack() as hooks:
            if self.blocks:
                hooks.enter_context(self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True))
            for place, block in enumerate(self.blocks):
                listener = _Listener(self._chosen, place)
                hooks.enter_context(block.router.register_forward_hook(listener.router_returned))
                hooks.enter_context(block.experts.register_forward_pre_hook(listener.experts_got, with_kwargs=True))
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        assert self._hooks is not None
        self._hooks.close()
        self._hooks = None
        if kind is not None:
            self._forget()

    def union(self, real_BN: Tensor | None = None) -> ExpertUnion | None:
        """Experts touched by the latest forward pass, as tensors on the target's device; None for a dense target.

        Reading forgets the pass, so that no pass is counted twice.

        Args:
            real_BN: bool, False on padding rows. Default: all real.

        Raises:
            ValueError: no forward pass inside `with`, or none since the last reading, a mixture layer that did not show
                its choice, or a mask of another shape.
        """
        if not self.blocks:
            return None
        rows, chosen = self._rows, dict(self._chosen)
        self._forget()
        if rows is None:
            raise ValueError("no forward pass to report on: run the target inside `with watch:`, then ask once")
        silent = [block.layer for place, block in enumerate(self.blocks) if place not in chosen]
        if silent:
            name = type(self.blocks[0].router).__name__
            raise ValueError(
                f"the mixture layers {silent} did not show which experts they chose ({name}): a fused kernel or a "
                "router of another kind. Load the target without kernel replacements, or measure without experts."
            )
        device = next(iter(chosen.values())).device
        if real_BN is None:
            real_BN = torch.ones(rows, dtype=torch.bool, device=device)
        if tuple(real_BN.shape) != rows:
            raise ValueError(f"real_BN has shape {tuple(real_BN.shape)}, but the forward pass had rows {list(rows)}")
        real_BN1 = real_BN.to(device, torch.bool)[..., None]
        unions, roots = [], []
        for place, block in enumerate(self.blocks):
            index_BNk = chosen[place].reshape(*rows, -1)
            # An index past the experts stands for "none of them" (an identity expert, another device's expert).
            counted_BNk = real_BN1 & (index_BNk >= 0) & (index_BNk < block.count)
            index_BNk = index_BNk.to(torch.int64).masked_fill(~counted_BNk, block.count)
            unions.append(_distinct(index_BNk, block.count))
            roots.append(_distinct(index_BNk[:, :1], block.count))
        return ExpertUnion(
            tuple(block.layer for block in self.blocks),
            tuple(block.count for block in self.blocks),
            torch.stack(unions, dim=1),
            torch.stack(roots, dim=1),
        )

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forget()
        first = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
        self._rows = (first.shape[0], first.shape[1])

    def _forget(self) -> None:
        self._rows = None
        self._chosen.clear()


@dataclass(frozen=True)
class _Listener:
    """Two places where a block shows its choice: what its router returns (logits, weights, indices in most
    families) and, where the block itself chooses (DBRX), what it hands to its experts."""

    chosen: dict[int, Tensor]
    place: int

    def router_returned(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._keep(output if isinstance(output, tuple | list) else (output,))

    def experts_got(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep((*args, *kwargs.values()))

    def _keep(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int32, torch.int64):
                self.chosen[self.place] = value
                return


def find_blocks(target: FrozenTarget) -> tuple[MoEBlock, ...]:
    """Mixture layers, in the order of the decoder layers: modules with `experts` beside a `gate` or `router`.

    Raises:
        ValueError: a mixture layer whose number of experts cannot be told.
    """
    blocks = []
    for layer, decoder_layer in enumerate(target._wiring.layers):
        for module in decoder_layer.modules():
            if is_expert_block(module):
                router, experts = _parts(module)
                blocks.append(MoEBlock(layer, router, experts, count_experts(module)))
    return tuple(blocks)


def is_expert_block(module: nn.Module) -> bool:
    """`experts` beside a `gate` or `router`."""
    children = dict(module.named_children())
    return "experts" in children and not children.keys().isdisjoint(("gate", "router"))


def _parts(block: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Router and experts."""
    children = dict(block.named_children())
    return children["gate" if "gate" in children else "router"], children["experts"]


def count_experts(block: nn.Module) -> int:
    """Experts of a mixture block.

    Raises:
        ValueError: it does not say.
    """
    router, experts = _parts(block)
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    for module in (experts, router):
        for name in ("num_experts", "num_routed_experts", "n_routed_experts"):
            if isinstance(count := getattr(module, name, None), int):
                return count
    raise ValueError(
        f"{type(experts).__name__} does not say how many experts it has (no num_experts): measure this target "
        "without experts, or teach eaglelab/target/experts.py where the number is"
    )


def _distinct(index_BNk: Tensor, count: int) -> Tensor:
    """How many different indices below `count` each sequence has, [B]; `count` itself stands for none."""
    touched_BE = torch.zeros(index_BNk.shape[0], count + 1, dtype=torch.bool, device=index_BNk.device)
    touched_BE.scatter_(1, index_BNk.flatten(1), True)
    return touched_BE[:, :count].sum(1)
