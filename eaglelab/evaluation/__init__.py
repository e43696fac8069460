"""Acceptance and speed of a drafter on prompts, and streaming generation."""

from eaglelab.data.conversations import load_prompts
from eaglelab.evaluation.calibration import Calibration
from eaglelab.evaluation.chats import Chat
from eaglelab.evaluation.evaluate import EvaluationResult, Settings, evaluate
from eaglelab.evaluation.metrics import TurnRecord, summarize
from eaglelab.evaluation.report import table
from eaglelab.evaluation.stream import Piece, Stream, mark, wants_color
from eaglelab.evaluation.suites import SUITES, Suite, load_suite
from eaglelab.evaluation.telemetry import log_to_wandb, open_sink, read_records, summarize_rounds, telemetry_table

__all__ = [
    "SUITES",
    "Calibration",
    "Chat",
    "EvaluationResult",
    "Piece",
    "Settings",
    "Stream",
    "Suite",
    "TurnRecord",
    "evaluate",
    "load_prompts",
    "load_suite",
    "log_to_wandb",
    "mark",
    "open_sink",
    "read_records",
    "summarize",
    "summarize_rounds",
    "table",
    "telemetry_table",
    "wants_color",
]
