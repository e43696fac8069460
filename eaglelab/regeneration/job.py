"""The job: prompts in, a file of answers out, with a bar in between."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from eaglelab.data.conversations import Conversation
from eaglelab.regeneration.answer_file import AnswerFile, Keep
from eaglelab.regeneration.answered import FAILED, Answered, Source


@dataclass
class Regenerated:
    """What a job did, and what its file holds now.

    answers, tokens: of this job.
    seconds: of this job, without loading.
    rounds, accepted: draft rounds, and draft tokens that were accepted in them.
    kept, left_out: rows of the file and of its left-out part, by the reason for which they ended.
    failures: (id, reason) of the prompts that failed in this job.
    interrupted: Ctrl-C came; the rows so far are there, in the order in which they came.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    accepted: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def tau(self) -> float | None:
        """Acceptance length, None without a draft round."""
        return 1 + self.accepted / self.rounds if self.rounds else None


def regenerate(
    source: Source,
    prompts: Sequence[Conversation],
    out: str | Path,
    *,
    keep: Keep = "ended",
    progress: bool = True,
) -> Regenerated:
    """Let ``source`` answer the prompts that ``out`` does not answer yet.

    Args:
        out: a .jsonl file, see `AnswerFile`; a file of an earlier job is continued.
        keep: which answers are for training.

    Raises:
        ValueError: see `AnswerFile` and `Source.answer`; or no prompt could be answered.
    """
    with AnswerFile(out, prompts, source.origin, keep) as file:
        done = file.done
        with _Progress(file, prompts, done, disable=not progress) as watcher:
            result = watcher.result
            try:
                source.answer(prompts, done, watcher)
            except KeyboardInterrupt:
                result.interrupted = True
            except (ValueError, OSError) as error:
                kept = f"; {result.answers} answers of this job are saved in {out}, the same command continues"
                raise ValueError(f"{error}{kept if result.answers else ''}") from error
        if not result.interrupted:
            file.finish()
        result.kept, result.left_out = file.stop_reasons[True], file.stop_reasons[False]
    if result.failures and not result.interrupted and set(result.kept + result.left_out) == {FAILED}:
        name, why = result.failures[0]
        raise ValueError(f"no prompt could be answered; the first one ({name}): {why}")
    return result


class _Progress:
    """Writes rows as they come, and shows answers, tokens per second and the time that is left."""

    def __init__(
        self, file: AnswerFile, prompts: Sequence[Conversation], done: Collection[str], *, disable: bool
    ) -> None:
        questions = {prompt.id: sum(message["role"] == "user" for message in prompt.messages) for prompt in prompts}
        finished = sum(count for name, count in questions.items() if name in done)
        self.result = Regenerated()
        self._file = file
        self._began = time.perf_counter()
        self._bar = tqdm(
            total=sum(questions.values()),
            initial=finished,
            desc="generate",
            unit="answer",
            smoothing=0,  # answers come in bursts
            disable=disable,
        )

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.result.seconds = time.perf_counter() - self._began
        self._bar.close()

    def answered(self, tokens: int | None, accepted: Sequence[int]) -> None:
        result = self.result
        result.answers += 1
        result.tokens += tokens or 0
        result.rounds += len(accepted)
        result.accepted += sum(accepted)
        self._show(1)

    def ended(self, one: Answered) -> None:
        self._file.append(one)
        failed = one.stop_reason == FAILED
        if failed:
            self.result.failures.append((one.id, one.failure or ""))
        unasked = one.chat.questions - one.chat.turn  # after a cut answer, or a failure
        self._show(failed + unasked)

    def _show(self, questions: int) -> None:
        result = self.result
        figures = {"tokens/s": f"{result.tokens / (time.perf_counter() - self._began):.0f}"}
        if result.tau is not None:
            figures["tau"] = f"{result.tau:.2f}"
        if result.failures:
            figures["failed"] = f"{len(result.failures)}"
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update(questions)
