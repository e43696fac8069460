"""How stored numbers are kept: plain types, and one or half a byte per number with scales.

Encoding works on each token alone, so a row of a store does not depend on its neighbours.

Letters: T tokens, d width, G groups of a row, k most probable tokens, V vocabulary. ``...`` is [T] or [B, S].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share a scale in ``int4``."""

Parts = Mapping[str, Tensor]
"""Tensors that together hold one encoded feature, [..., n] each, by suffix."""


class Encoding(ABC):
    """Turns features into stored tensors and back.

    Attributes:
        name: as in ``dtype=``.
    """

    name: str

    @abstractmethod
    def encode(self, x_Td: Tensor) -> dict[str, Tensor]:
        """Features of any floating type -> the tensors to store."""

    @abstractmethod
    def decode(self, parts: Parts, width: int) -> Tensor:
        """Stored tensors -> features [..., width] in fp32."""

    @abstractmethod
    def slack(self, x_Td: Tensor) -> Tensor:
        """[T, d], how far a decoded number may lie from ``x_Td`` by rounding alone."""

    def bytes_per_token(self, width: int) -> int:
        """Stored size of one token's feature."""
        return sum(part.nbytes for part in self.encode(torch.zeros(1, width)).values())


class Plain(Encoding):
    """The numbers in a floating type."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def encode(self, x_Td: Tensor) -> dict[str, Tensor]:
        return {"": x_Td.to(self.dtype)}

    def decode(self, parts: Parts, width: int) -> Tensor:
        return parts[""].float()

    def slack(self, x_Td: Tensor) -> Tensor:
        kind = torch.finfo(self.dtype)
        return x_Td.float().abs() * kind.eps / 2 + kind.smallest_normal * kind.eps


class Scaled(Encoding):
    """One byte per number and a scale per token, so that its largest number is the type's largest.

    ``int8`` has equal steps; ``float8`` (e4m3) has three bits of mantissa at every size.
    """

    def __init__(self, name: str, dtype: torch.dtype, largest: float) -> None:
        self.name, self.dtype, self.largest = name, dtype, largest

    def _scale(self, x_Td: Tensor) -> Tensor:
        return _scale(x_Td.float().abs().amax(-1, keepdim=True), self.largest)

    def encode(self, x_Td: Tensor) -> dict[str, Tensor]:
        scale_T1 = self._scale(x_Td)
        scaled_Td = (x_Td.float() / scale_T1.float()).clamp(-self.largest, self.largest)
        if not self.dtype.is_floating_point:
            scaled_Td = scaled_Td.round()
        return {"": scaled_Td.to(self.dtype), "scale": scale_T1}

    def decode(self, parts: Parts, width: int) -> Tensor:
        return parts[""].float() * parts["scale"].float()

    def slack(self, x_Td: Tensor) -> Tensor:
        scale_T1 = self._scale(x_Td).float()
        if not self.dtype.is_floating_point:
            return (scale_T1 / 2).expand_as(x_Td)
        kind = torch.finfo(self.dtype)
        return x_Td.float().abs() * kind.eps / 2 + scale_T1 * kind.smallest_normal * kind.eps


class Int4(Encoding):
    """Half a byte per number: 15 equal steps per group of 32, each group with its own scale."""

    name = "int4"

    def encode(self, x_Td: Tensor) -> dict[str, Tensor]:
        x_TGn = self._grouped(x_Td)
        scale_TG1 = _scale(x_TGn.abs().amax(-1, keepdim=True), 7)
        code_Td = ((x_TGn / scale_TG1.float()).round().clamp(-7, 7) + 8).to(torch.uint8).flatten(-2)
        packed = code_Td[..., 0::2] | (code_Td[..., 1::2] << 4)
        return {"": packed, "scale": scale_TG1.squeeze(-1)}

    def decode(self, parts: Parts, width: int) -> Tensor:
        packed = parts[""]
        code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float() - 8
        grouped = code.unflatten(-1, (-1, GROUP)) * parts["scale"].float()[..., None]
        return grouped.flatten(-2)[..., :width]

    def slack(self, x_Td: Tensor) -> Tensor:
        x_TGn = self._grouped(x_Td)
        scale_TG1 = _scale(x_TGn.abs().amax(-1, keepdim=True), 7).float()
        return (scale_TG1 / 2).expand_as(x_TGn).flatten(-2)[..., : x_Td.shape[-1]]

    @staticmethod
    def _grouped(x_Td: Tensor) -> Tensor:
        missing = -x_Td.shape[-1] % GROUP
        return torch.nn.functional.pad(x_Td.float(), (0, missing)).unflatten(-1, (-1, GROUP))


def _scale(largest_T1: Tensor, steps: float) -> Tensor:
    """bf16 scales at which ``largest_T1`` does not exceed ``steps``; 1 where all numbers are 0."""
    exact = torch.where(largest_T1 > 0, largest_T1 / steps, 1.0)
    rounded = exact.to(torch.bfloat16)
    # bf16 has 8 bits: a scale rounded down would clip the largest number
    return torch.where(rounded.float() < exact, torch.nextafter(rounded, torch.full_like(rounded, torch.inf)), rounded)


ENCODINGS: dict[str, Encoding] = {
    one.name: one
    for one in (
        Plain("float32", torch.float32),
        Plain("bfloat16", torch.bfloat16),
        Scaled("float8", torch.float8_e4m3fn, 448.0),
        Scaled("int8", torch.int8, 127.0),
        Int4(),
    )
}
"""By the name that ``dtype=`` takes."""


def encoding(name: str) -> Encoding:
    """The encoding of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in ENCODINGS:
        raise ValueError(f"dtype={name!r} is not one of {', '.join(ENCODINGS)}")
    return ENCODINGS[name]
