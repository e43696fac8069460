"""The tiny target of the variants."""

from tests.variants.conftest import target

__all__ = ["target"]
