"""The target answers prompts for training, by the engine or by a server, into a file that the next job continues."""

from eaglelab.regeneration.answer_file import AnswerFile, Keep
from eaglelab.regeneration.answered import Answer, Answered, Origin, Source, Watcher
from eaglelab.regeneration.by_engine import EngineSource
from eaglelab.regeneration.by_server import ServerSource
from eaglelab.regeneration.client import Client, ClientSettings, PromptFailed
from eaglelab.regeneration.job import Regenerated, regenerate

__all__ = [
    "Answer",
    "AnswerFile",
    "Answered",
    "Client",
    "ClientSettings",
    "EngineSource",
    "Keep",
    "Origin",
    "PromptFailed",
    "Regenerated",
    "ServerSource",
    "Source",
    "Watcher",
    "regenerate",
]
