"""Noise on input features: what EAGLE-1 adds so that a drafter survives its own imperfect features.

Letters: B sequences, R rows, d hidden width.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

NoiseLaw = Literal["none", "paper_uniform", "length_scaled", "gaussian"]


def check_noise(law: str, scale: float) -> None:
    """Raises ValueError for an unknown law or a negative scale."""
    if law not in get_args(NoiseLaw):
        raise ValueError(f"noise law {law!r} is not one of {', '.join(get_args(NoiseLaw))}")
    if scale < 0:
        raise ValueError(f"noise scale must be >= 0, got {scale}")


def feature_noise(
    shape: torch.Size | tuple[int, ...],
    law: NoiseLaw,
    *,
    scale: float = 0.1,
    length_BR: Tensor | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """Draw noise for input features ``[B, R, d]``; None for law ``none``.

    Laws, at their published ``scale`` of 0.1:

    * ``paper_uniform``: U[-scale, scale] (EAGLE paper).
    * ``length_scaled``: U[-scale, scale] * 512 / L with L the token count of the row's own sample (SafeAILab
      training script); equal to the former at L = 512, wider for short samples.
    * ``gaussian``: N(0, scale^2).

    Args:
        shape: of the features.
        law: one of the above.
        scale: half-width, or standard deviation.
        length_BR: int64 L per row, for ``length_scaled``.
        generator: random stream, on the CPU so that a seed gives the same noise on every device.
        device: where the result goes.

    Raises:
        ValueError: unknown law, negative scale, or ``length_scaled`` without lengths.
    """
    check_noise(law, scale)
    if law == "none":
        return None
    if law == "gaussian":
        return (torch.randn(shape, generator=generator) * scale).to(device, non_blocking=True)
    noise = ((torch.rand(shape, generator=generator) - 0.5) * (2 * scale)).to(device, non_blocking=True)
    if law == "paper_uniform":
        return noise
    if length_BR is None:
        raise ValueError("length_scaled noise needs the length of each row's sample")
    return noise * (512 / length_BR.clamp(min=1))[..., None]
