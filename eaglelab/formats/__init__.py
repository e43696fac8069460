"""Drafters of other projects come in, ours go out: docs/formats.md has the tables."""

from eaglelab.formats.exporting import export_drafter
from eaglelab.formats.importing import Imported, import_drafter, read_drafter, training_overrides
from eaglelab.formats.layouts import FORMATS, Format

__all__ = [
    "FORMATS",
    "Format",
    "Imported",
    "export_drafter",
    "import_drafter",
    "read_drafter",
    "training_overrides",
]
