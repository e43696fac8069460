"""How long training attention takes by each of its kernels: one attention of a draft step, forward and backward.

Letters: B sequences, R rows, H heads, G key/value heads, D head width, s draft steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglelab.drafters.flex import block_mask, flex_joint_attention, flex_kernel, flex_usable
from eaglelab.drafters.joint import joint_attention
from eaglelab.drafters.native import MASKED_ROWS, BlockedAttention
from eaglelab.evaluation.alternation import Spread, alternate, ratio
from eaglelab.training.work import matmul_flops, seconds_per_call

Attention = Callable[..., Tensor]
"""(q, k, v, *own keys, *own values) -> [B, H, R, D]."""
PAIR_FLOPS = 14
"""Per pair of row and key, and per number of a head: two products forward, five backward, of which one computes the
scores again."""


@dataclass
class AttentionContest:
    """What was measured.

    Attributes:
        setting: the arguments.
        seconds: of a call by contestant, one per repetition: ``blocks``, which runs anywhere and is what others are
            compared with; ``flex`` where it is usable; of a step without own keys ``masked`` (one kernel with a mask of
            all pairs, of which training has none longer) and, of one segment, ``causal``.
        peak_bytes: what each took at once beside its inputs and masks; of CUDA devices.
        flops: of the pairs of row and native key that see each other, forward and backward; what a kernel computes of
            other pairs is none of it.
        matmul_flops: per second, of a plain product in the same number type, measured in between.
        refusal: why flex is not among them; None: it is.
        interrupted: Ctrl-C ended it early.
    """

    setting: dict[str, Any]
    seconds: dict[str, list[float]]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    matmul_flops: float = 0.0
    refusal: str | None = None
    interrupted: bool = False

    @property
    def name(self) -> str:
        """What tells it from others of the same heads."""
        at, parts = self.setting, [self.setting["dtype"], f"{self.setting['rows']:,} rows"]
        counted = (("segments", "segment"), ("steps", "own key"))
        return ", ".join(parts + [f"{at[n]} {what}{'' if at[n] == 1 else 's'}" for n, what in counted])

    def of_matmul(self, name: str) -> float:
        """The matrix product's time for the flops over a contestant's."""
        return self.flops / Spread.of(self.seconds[name]).median / self.matmul_flops

    def speedup(self) -> dict[str, Spread]:
        """How many times as fast as the blocks, by contestant."""
        return {name: ratio(self.seconds["blocks"], own) for name, own in self.seconds.items()}

    def to_dict(self) -> dict[str, Any]:
        contestants = {
            name: {
                "seconds": Spread.of(self.seconds[name]).to_dict(),
                "speedup": speedup.to_dict(),
                "peak_bytes": self.peak_bytes.get(name),
                "share_of_matmul": self.of_matmul(name),
            }
            for name, speedup in self.speedup().items()
        }
        rates = {"flops": self.flops, "matmul_flops_per_s": self.matmul_flops, "refusal": self.refusal}
        return {"setting": self.setting, "interrupted": self.interrupted, **rates, "contestants": contestants}


def attention_contest(
    rows: int,
    heads: int,
    head_dim: int,
    batch: int,
    segments: int,
    steps: int,
    device: torch.device,
    dtype: torch.dtype,
    repetitions: int,
    *,
    groups: int | None = None,
    progress: str | None = None,
) -> AttentionContest:
    """Let the kernels take turns on random rows; all rows ask. Masks are made beforehand, as once per batch.

    Args:
        rows, heads, head_dim, batch: R, H, D and B.
        segments: of each sequence, of equal lengths.
        steps: s, own keys of each row.
        groups: G; None: H.
        progress: name of a progress bar; None: no bar.

    Raises:
        ValueError: more segments than rows, or heads that do not share their groups evenly.
    """
    groups = heads if groups is None else groups
    check_sizes(rows, heads, groups, segments)
    shapes = [(heads, rows), *[(groups, rows)] * (2 + 2 * steps)]
    drawn = [torch.randn(batch, *shape, head_dim, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    weight = torch.randn(batch, heads, rows, head_dim, device=device, dtype=dtype)
    row_R = torch.arange(rows, device=device)
    start_1R = (row_R // -(-rows // segments) * -(-rows // segments))[None]
    peak: dict[str, int] = {}

    def run(name: str, attend: Attention) -> float:
        return _timed(name, lambda: torch.autograd.grad(attend(*drawn), drawn, weight), device, peak)

    contestants = _contestants(drawn, start_1R, row_R, steps, segments)
    runs = {name: (lambda name=name, attend=attend: run(name, attend)) for name, attend in contestants.items()}
    rate = {"matmul": lambda: matmul_flops(device=str(device), dtype=dtype)}
    seconds, interrupted = alternate(runs | rate, repetitions, progress=progress)
    rates = seconds.pop("matmul")
    pairs = batch * int((row_R - start_1R + 1).sum())
    setting: dict[str, Any] = {"rows": rows, "heads": heads, "groups": groups, "head_dim": head_dim, "batch": batch}
    setting |= {"segments": segments, "steps": steps, "device": str(device), "dtype": str(dtype).split(".")[-1]}
    return AttentionContest(
        setting,
        seconds,
        peak,
        flops=PAIR_FLOPS * pairs * heads * head_dim,
        matmul_flops=statistics.median(rates) if rates else 0.0,
        refusal=None if "flex" in contestants else flex_kernel(heads, groups, head_dim).refusal(device, dtype),
        interrupted=interrupted,
    )


def attention_table(contests: Sequence[AttentionContest]) -> str:
    """Plain text: one line per contestant, and one for every reason why FlexAttention is not among them."""
    at = contests[0].setting
    width = max(len(one.name) for one in contests) + 2
    lines = [
        f"attention of a draft step and its gradients, {at['batch']} x {at['heads']} heads of {at['head_dim']} over "
        f"{at['groups']} of keys",
        f"{'':<{width}}{'':<8}{'ms':>9}{'quartiles':>18}{'of matmul':>11}{'peak MiB':>10}   times as fast as blocks",
    ]
    for one in contests:
        for name, speedup in one.speedup().items():
            spread, peak = Spread.of(one.seconds[name]), one.peak_bytes.get(name)
            quartiles = f"{1e3 * spread.low:.2f} to {1e3 * spread.high:.2f}"
            lines.append(
                f"{one.name if name == 'blocks' else '':<{width}}{name:<8}{1e3 * spread.median:>9.2f}{quartiles:>18}"
                f"{one.of_matmul(name):>11.0%}{'' if peak is None else f'{peak / 2**20:.0f}':>10}"
                f"   {speedup.times() if name != 'blocks' else ''}".rstrip()
            )
    reasons = dict.fromkeys(one.refusal for one in contests if one.refusal is not None)
    return "\n".join(lines + [f"FlexAttention is not usable here: {reason}" for reason in reasons])


def check_sizes(rows: int, heads: int, groups: int, segments: int) -> None:
    """Raises ValueError for more segments than rows, or heads that do not share their groups evenly."""
    if not 1 <= segments <= rows:
        raise ValueError(f"segments={segments} must be between 1 and rows={rows}")
    if heads % groups:
        raise ValueError(f"heads={heads} must be a multiple of groups={groups}")


def _contestants(
    drawn: Sequence[Tensor], start_1R: Tensor, row_R: Tensor, steps: int, segments: int
) -> dict[str, Attention]:
    B, H, R, _ = drawn[0].shape
    repeat = H // drawn[1].shape[1]
    blocks = BlockedAttention(start_1R, spans=(start_1R[0].tolist(), list(range(R))))

    def spread(keys: Sequence[Tensor]) -> list[Tensor]:
        return [x if repeat == 1 else x.repeat_interleave(repeat, dim=1) for x in keys]

    def in_blocks(q: Tensor, *keys: Tensor) -> Tensor:
        k, v, *own = spread(keys)
        return joint_attention(q, k, v, own[:steps], own[steps:], blocks)

    found: dict[str, Attention] = {"blocks": in_blocks}
    if flex_usable(*drawn[:2]):
        mask = block_mask(start_1R, row_R[None], B, R)
        found["flex"] = lambda q, k, v, *own: flex_joint_attention(q, k, v, own[:steps], own[steps:], mask)

    def at_once(bias: Tensor | None) -> Attention:
        def attend(q: Tensor, *keys: Tensor) -> Tensor:
            k, v = spread(keys)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)

        return attend

    if not steps and R <= MASKED_ROWS:
        hidden_RR = (row_R[None] > row_R[:, None]) | (row_R[None] < start_1R[0][:, None])
        bias_RR = torch.zeros(R, R, device=row_R.device, dtype=drawn[0].dtype).masked_fill_(hidden_RR, -torch.inf)
        found["masked"] = at_once(bias_RR[None, None])
    if not steps and segments == 1:
        found["causal"] = at_once(None)
    return found


def _timed(name: str, run: Callable[[], object], device: torch.device, peak: dict[str, int]) -> float:
    """Seconds of a call; on CUDA also the most that was allocated on top of what was there before."""
    if device.type != "cuda":
        return seconds_per_call(run, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seconds = seconds_per_call(run, device)
    peak[name] = torch.cuda.max_memory_allocated(device) - before
    return seconds
