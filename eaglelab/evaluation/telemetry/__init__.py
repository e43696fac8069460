"""Records of single rounds: written while decoding, read back, summed up.

One record is one sequence in one round, a flat dict with the fields of `FIELDS`; others are kept as they come. Times
are in seconds and are the sequence's share of the round (round time / sequences in the batch), so that shares add up
to wall time. What a serving loop should show: article, section 0x0C.
"""

from eaglelab.evaluation.telemetry.fields import FIELDS, PHASES, Record
from eaglelab.evaluation.telemetry.reading import read_records
from eaglelab.evaluation.telemetry.scalars import log_to_wandb
from eaglelab.evaluation.telemetry.sinks import JsonlSink, ParquetSink, Sink, open_sink, partial_name
from eaglelab.evaluation.telemetry.summary import summarize_rounds
from eaglelab.evaluation.telemetry.table import telemetry_table

__all__ = [
    "FIELDS",
    "PHASES",
    "JsonlSink",
    "ParquetSink",
    "Record",
    "Sink",
    "log_to_wandb",
    "open_sink",
    "partial_name",
    "read_records",
    "summarize_rounds",
    "telemetry_table",
]
