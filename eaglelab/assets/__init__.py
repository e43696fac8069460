"""What travels inside the package: a small target model and conversations it answered."""

from importlib.resources import files
from typing import Literal, get_args

DataName = Literal["train", "val", "eval"]


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
