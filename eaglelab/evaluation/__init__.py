"""Acceptance and speed of a drafter on prompts, and streaming generation."""

from eaglelab.data.conversations import load_prompts
from eaglelab.evaluation.evaluate import EvaluationResult, Settings, evaluate
from eaglelab.evaluation.metrics import TurnRecord, summarize
from eaglelab.evaluation.report import table
from eaglelab.evaluation.stream import Piece, Stream, mark, wants_color

__all__ = [
    "EvaluationResult",
    "Piece",
    "Settings",
    "Stream",
    "TurnRecord",
    "evaluate",
    "load_prompts",
    "mark",
    "summarize",
    "table",
    "wants_color",
]
