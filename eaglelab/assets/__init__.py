"""What travels inside the package: a small target model, conversations it answered, and benchmark suites."""

from importlib.resources import files
from typing import Literal, get_args

DataName = Literal["train", "val", "eval"]
SuiteName = Literal["mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa", "spec_bench"]


def bundled_target() -> str:
    """Folder of the bundled target, in the layout that `from_pretrained` reads.

    A 2,048-token Llama chat model trained on GSM8K worked solutions; its model card is the
    README.md in that folder.
    """
    return str(files(__name__) / "target")


def bundled_data(name: DataName) -> str:
    """Path of a bundled JSONL file.

    `train` and `val` hold conversations (`id`, `messages`) on GSM8K train questions, answered
    greedily by the bundled target; `eval` holds GSM8K test questions (`question_id`, `category`,
    `turns`, `reference`). Raises ValueError for any other name.
    """
    if name not in get_args(DataName):
        known = ", ".join(get_args(DataName))
        raise ValueError(f"no bundled data called {name!r}; choose one of {known}")
    return str(files(__name__) / "data" / f"{name}.jsonl")


def bundled_suite(name: SuiteName) -> str:
    """Path of a benchmark suite (`question_id`, `category`, `turns`); its folder's README.md has sources and licences.

    Raises ValueError for any other name.
    """
    if name not in get_args(SuiteName):
        known = ", ".join(get_args(SuiteName))
        raise ValueError(f"no suite called {name!r}; choose one of {known}, or give the path of a JSONL file")
    return str(files(__name__) / "suites" / f"{name}.jsonl")
