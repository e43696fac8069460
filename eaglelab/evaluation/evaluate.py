"""Decode prompts with and without the drafter, alternately in one process, and compare.

Alternating answer by answer (and swapping the order every time) keeps slow drifts of the machine,
such as its clock or other jobs, out of the speed-up.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tqdm import tqdm

import eaglelab
from eaglelab.data.chat import encode_prompt
from eaglelab.data.conversations import Conversation, Message
from eaglelab.decoding import Drafter, Engine, GenerationResult, TreePolicy
from eaglelab.evaluation.metrics import Timing, TurnRecord, summarize

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget

Encode = Callable[[list[Message]], Sequence[int]]  # messages -> prompt ids
Decode = Callable[[Sequence[int]], str]  # answer ids -> text, for the next turn


@dataclass(frozen=True)
class Settings:
    """How to evaluate.

    max_new_tokens: exact limit per answer.
    turns: "first" answers the first turn of each prompt; "all" every turn, each after the model's
        own earlier answers.
    ignore_eos: decode to the length limit.
    check_generate: also compare the ids with `model.generate(do_sample=False)`; slow.
    warmup: answers decoded both ways before anything is measured.
    temperature: 0, greedy; nothing else yet.
    """

    max_new_tokens: int = 128
    turns: str = "first"
    ignore_eos: bool = False
    check_generate: bool = False
    warmup: int = 1
    temperature: float = 0.0
    progress: bool = True

    def __post_init__(self) -> None:
        if self.temperature != 0:
            raise ValueError(f"temperature={self.temperature}: evaluation decodes greedily for now; use 0")
        if self.turns not in ("first", "all"):
            raise ValueError(f"turns={self.turns!r}: choose first or all")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: ask for at least one token")


@dataclass
class EvaluationResult:
    """What an evaluation measured; `to_dict()` is the content of `metrics.json`.

    partial: the run was interrupted; the turns measured so far are all here.
    skipped: prompts that left no room for an answer, as (id, reason).
    """

    turns: list[TurnRecord]
    settings: dict[str, Any]
    versions: dict[str, str]
    prompts: int
    partial: bool = False
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Totals (see `metrics.summarize`), settings, versions, then every answer's record."""
        return {
            **summarize(self.turns),
            "partial": self.partial,
            "prompts": self.prompts,
            "skipped": [{"id": name, "reason": reason} for name, reason in self.skipped],
            "settings": self.settings,
            "versions": self.versions,
            "per_prompt": [turn.to_dict() for turn in self.turns],
        }


def evaluate(
    target: FrozenTarget,
    drafter: Drafter | None,
    tree: TreePolicy | None,
    prompts: Sequence[Conversation],
    settings: Settings | None = None,
    *,
    encode: Encode | None = None,
    decode: Decode | None = None,
) -> EvaluationResult:
    """Answer every prompt with the drafter and without it.

    With `tree` None both sides decode plainly: tau is 1 and the speed-up shows the noise of the
    measurement. An interrupt (Ctrl-C) ends the run early with `partial` set.

    Args:
        prompts: system and user messages, as `eaglelab.data.conversations.load_prompts` reads them.
        encode, decode: messages -> prompt ids and answer ids -> text; None takes the target's
            tokenizer and its chat template.

    Raises:
        ValueError: no prompt had room for an answer, or the target has no tokenizer and no
            `encode` is given.
    """
    settings = settings or Settings()
    encode = encode or _chat_encoder(target)
    decode = decode or _decoder(target)
    run = _Run(target, Engine(target, drafter if tree else None, tree), settings, encode, decode)
    result = EvaluationResult([], _describe(target, drafter, tree, settings), _versions(), 0)
    try:
        for prompt in prompts[: settings.warmup]:
            list(run.answers(prompt, flip=False, skipped=[]))
        bar = tqdm(prompts, desc="evaluate", unit="prompt", disable=not settings.progress)
        for number, prompt in enumerate(bar):
            for turn in run.answers(prompt, flip=number % 2 == 1, skipped=result.skipped):
                result.turns.append(turn)
            result.prompts = number + 1
            if result.turns:
                bar.set_postfix(_running(result.turns), refresh=False)
    except KeyboardInterrupt:
        result.partial = True
    if not result.turns and not result.partial:
        raise ValueError(
            "no prompt left room for an answer; the first one: "
            f"{result.skipped[0][1] if result.skipped else 'there are no prompts'}"
        )
    return result


@dataclass(frozen=True)
class _Run:
    target: FrozenTarget
    engine: Engine
    settings: Settings
    encode: Encode
    decode: Decode

    def answers(self, prompt: Conversation, *, flip: bool, skipped: list[tuple[str, str]]) -> Iterator[TurnRecord]:
        """Measure the prompt's turns, each after the target's own answers to the earlier ones."""
        asked = sum(message["role"] == "user" for message in prompt.messages)
        last = min(asked, 1) if self.settings.turns == "first" else asked
        messages: list[Message] = []
        number = 0
        for message in prompt.messages:
            messages.append(message)
            if message["role"] != "user":
                continue
            number += 1
            ids = list(self.encode(messages))
            room = self.target.max_positions - len(ids)
            if room < 1:
                limit = self.target.max_positions
                skipped.append((prompt.id, f"turn {number} has {len(ids)} tokens of {limit}"))
                return
            record, answer = self._measure(prompt, number, ids, flip)
            yield record
            if number == last:
                return
            messages.append({"role": "assistant", "content": self.decode(answer)})

    def _measure(self, prompt: Conversation, turn: int, ids: list[int], flip: bool) -> tuple[TurnRecord, list[int]]:
        engines = [self.engine, Engine(self.target)]
        stop_ids = frozenset[int]() if self.settings.ignore_eos else self.target.eos_token_ids
        results = {}
        for engine in reversed(engines) if flip else engines:
            results[engine is self.engine] = engine.generate(
                ids, max_new_tokens=self.settings.max_new_tokens, stop_ids=stop_ids
            )
        speculative, baseline = results[True], results[False]
        same = None
        if self.settings.check_generate:
            room = self.target.max_positions - len(ids)
            limit = min(self.settings.max_new_tokens, room)
            same = speculative.tokens == generate_ids(self.target, ids, limit, stop_ids)
        rounds = speculative.rounds
        record = TurnRecord(
            id=prompt.id,
            turn=turn,
            category=prompt.category,
            prompt_tokens=len(ids),
            new_tokens=len(speculative.tokens),
            stop_reason=speculative.stop_reason,
            accepted=speculative.accepted,
            drafted=sum(record.drafted for record in rounds),
            verified=sum(record.verified for record in rounds),
            draft_s=sum(record.draft_s for record in rounds),
            verify_s=sum(record.verify_s for record in rounds),
            commit_s=sum(record.commit_s for record in rounds),
            speculative=_timing(speculative),
            baseline=_timing(baseline),
            identical=speculative.tokens == baseline.tokens,
            identical_to_generate=same,
        )
        return record, baseline.tokens


def generate_ids(
    target: FrozenTarget, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int]
) -> list[int]:
    """New token ids of the library's own greedy `generate`.

    The model's generation defaults are set aside meanwhile: `generate` would fill in its end tokens and penalties
    wherever a value is left open, and greedy means the argmax of the logits.
    """
    model = target.model
    ids_BN = torch.tensor([list(prompt_ids)], device=target.device)
    defaults = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=sorted(stop_ids) or None, pad_token_id=0
    )
    try:
        output_BS = model.generate(ids_BN, attention_mask=torch.ones_like(ids_BN))
    finally:
        model.generation_config = defaults
    return output_BS[0, len(prompt_ids) :].tolist()


def _timing(result: GenerationResult) -> Timing:
    tokens = sum(record.published for record in result.rounds)
    return Timing(tokens, result.decode_s, result.prefill_s)


def _running(turns: Sequence[TurnRecord]) -> dict[str, str]:
    accepted = [count for turn in turns for count in turn.accepted]
    tau = 1 + sum(accepted) / max(len(accepted), 1)
    identical = sum(turn.identical for turn in turns)
    return {"tau": f"{tau:.2f}", "identical": f"{identical}/{len(turns)}"}


def _chat_encoder(target: FrozenTarget) -> Encode:
    if target.tokenizer is None:
        raise ValueError("the target has no tokenizer: load it with one, or pass encode=")
    return lambda messages: encode_prompt(target.tokenizer, messages)


def _decoder(target: FrozenTarget) -> Decode:
    return lambda ids: target.tokenizer.decode(ids, skip_special_tokens=True)


def _describe(
    target: FrozenTarget, drafter: Drafter | None, tree: TreePolicy | None, settings: Settings
) -> dict[str, Any]:
    return {
        **{key: value for key, value in asdict(settings).items() if key != "progress"},
        "tree": {"name": "none"} if tree is None else tree.settings(),
        "taps": [] if drafter is None else list(drafter.taps),
        "target": str(target.source),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "batch": 1,
    }


def _versions() -> dict[str, str]:
    return {
        "eaglelab": getattr(eaglelab, "__version__", "unknown"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
