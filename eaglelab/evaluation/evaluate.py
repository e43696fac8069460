"""Decode prompts with and without the drafter, alternately in one process, and compare.

Alternating answer by answer, or batch by batch, and swapping the order every time keeps slow drifts of the
machine, such as its clock or other jobs, out of the speed-up.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tqdm import tqdm

import eaglelab
from eaglelab.data.conversations import Conversation
from eaglelab.decoding import Drafter, Engine, GenerationResult, Sampling, TreePolicy
from eaglelab.evaluation.chats import Chat, Decode, Encode, chat_decoder, chat_encoder
from eaglelab.evaluation.metrics import Timing, TurnRecord, summarize
from eaglelab.evaluation.telemetry.texts import TokenTexts, told_records

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget


@dataclass(frozen=True)
class Settings:
    """How to evaluate.

    max_new_tokens: exact limit per answer.
    turns: "first" answers the first turn of each prompt; "all" every turn, each after the model's
        own earlier answers.
    ignore_eos: decode to the length limit.
    check_generate: also compare the ids with `model.generate(do_sample=False)`; slow.
    warmup: answers decoded both ways before anything is measured.
    sampling: how tokens are chosen; prompt i has its seed + i, with the drafter and without.
    batch: prompts that are decoded together.
    compile: run rounds through `torch.compile`, with the drafter and without; see `Engine`.
    graphs: replay rounds as CUDA graphs, with the drafter and without.
    """

    max_new_tokens: int = 128
    turns: str = "first"
    ignore_eos: bool = False
    check_generate: bool = False
    warmup: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    batch: int = 1
    compile: bool = False
    graphs: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if self.check_generate and (not self.sampling.greedy or self.sampling.in_context):
            raise ValueError(
                "check_generate=true compares ids with the library's plain greedy decoding: "
                "use temperature=0 and repetition_penalty=1"
            )
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: decode at least one prompt at a time")
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
    on_record: Callable[[dict[str, Any]], None] | None = None,
) -> EvaluationResult:
    """Answer every prompt with the drafter and without it.

    With `tree` None both sides decode plainly: tau is 1 and the speed-up shows the noise of the
    measurement. An interrupt (Ctrl-C) ends the run early with `partial` set.

    Args:
        prompts: system and user messages, as `eaglelab.data.conversations.load_prompts` reads them.
        encode, decode: messages -> prompt ids and answer ids -> text; None takes the target's
            tokenizer and its chat template.
        on_record: called with the telemetry record of every measured round with the drafter
            (`eaglelab.evaluation.telemetry`), with its tree and the texts of its tokens; None records no nodes and
            costs nothing.

    Raises:
        ValueError: no prompt had room for an answer, or the target has no tokenizer and no
            `encode` is given.
    """
    settings = settings or Settings()
    encode = encode or chat_encoder(target)
    decode = decode or chat_decoder(target)
    engine = Engine(
        target,
        drafter if tree else None,
        tree,
        record_nodes=on_record is not None,
        compile=settings.compile,
        graphs=settings.graphs,
    )
    plain = Engine(target, compile=settings.compile, graphs=settings.graphs)
    run = _Run(target, engine, plain, settings, encode, decode)
    result = EvaluationResult([], _describe(target, drafter, tree, settings), _versions(), 0)
    size = settings.batch
    groups = [prompts[first : first + size] for first in range(0, len(prompts), size)]
    try:
        if settings.warmup:
            list(run.answers(prompts[: max(settings.warmup, size)], first=0, flip=False, skipped=[]))
        run.on_record = on_record
        if on_record is not None and target.tokenizer is not None:
            run.texts = TokenTexts(target.tokenizer)
        with tqdm(total=len(prompts), desc="evaluate", unit="prompt", disable=not settings.progress) as bar:
            for number, group in enumerate(groups):
                for turn in run.answers(group, first=number * size, flip=number % 2 == 1, skipped=result.skipped):
                    result.turns.append(turn)
                result.prompts += len(group)
                if result.turns:
                    bar.set_postfix(_running(result.turns), refresh=False)
                bar.update(len(group))
    except KeyboardInterrupt:
        result.partial = True
    if not result.turns and not result.partial:
        raise ValueError(
            "no prompt left room for an answer; the first one: "
            f"{result.skipped[0][1] if result.skipped else 'there are no prompts'}"
        )
    return result


@dataclass
class _Run:
    target: FrozenTarget
    engine: Engine
    plain: Engine
    settings: Settings
    encode: Encode
    decode: Decode
    on_record: Callable[[dict[str, Any]], None] | None = None
    texts: TokenTexts | None = None
    asked: int = 0

    def answers(
        self, prompts: Sequence[Conversation], *, first: int, flip: bool, skipped: list[tuple[str, str]]
    ) -> Iterator[TurnRecord]:
        """Measure the prompts' turns together, each after the target's own answers to the earlier ones."""
        chats = [Chat(prompt, first + number) for number, prompt in enumerate(prompts)]
        while chats := [chat for chat in chats if chat.ask(self.settings.turns)]:
            fitting, ids = [], []
            for chat in chats:
                prompt_ids = list(self.encode(chat.messages))
                if len(prompt_ids) < self.target.max_positions:
                    fitting.append(chat)
                    ids.append(prompt_ids)
                else:
                    limit = self.target.max_positions
                    skipped.append((chat.prompt.id, f"turn {chat.turn} has {len(prompt_ids)} tokens of {limit}"))
            chats = fitting
            if not chats:
                return
            for chat, (record, answer) in zip(chats, self._measure(chats, ids, flip), strict=True):
                chat.answer(self.decode(answer))
                yield record

    def _measure(self, chats: list[Chat], ids: list[list[int]], flip: bool) -> list[tuple[TurnRecord, list[int]]]:
        engines = [self.engine, self.plain]
        stop_ids = frozenset[int]() if self.settings.ignore_eos else self.target.eos_token_ids
        base = self.settings.sampling
        results = {}
        for engine in reversed(engines) if flip else engines:
            results[engine is self.engine] = engine.generate(
                ids,
                max_new_tokens=self.settings.max_new_tokens,
                stop_ids=stop_ids,
                sampling=[base.with_seed(base.seed + chat.number) for chat in chats],
                batch=self.settings.batch,
            )
        if self.on_record is not None:
            for chat, result in zip(chats, results[True], strict=True):
                for record in told_records(result, self.texts, chat.messages[-1]["content"]):
                    self.on_record(record | {"request": self.asked, "id": chat.prompt.id, "turn": chat.turn})
                self.asked += 1
        return [
            (self._record(chat, prompt_ids, stop_ids, speculative, baseline), baseline.tokens)
            for chat, prompt_ids, speculative, baseline in zip(chats, ids, results[True], results[False], strict=True)
        ]

    def _record(
        self,
        chat: Chat,
        ids: list[int],
        stop_ids: frozenset[int],
        speculative: GenerationResult,
        baseline: GenerationResult,
    ) -> TurnRecord:
        same = None
        if self.settings.check_generate:
            limit = min(self.settings.max_new_tokens, self.target.max_positions - len(ids))
            same = speculative.tokens == generate_ids(self.target, ids, limit, stop_ids)
        rounds = speculative.rounds
        return TurnRecord(
            id=chat.prompt.id,
            turn=chat.turn,
            category=chat.prompt.category,
            prompt_tokens=len(ids),
            new_tokens=len(speculative.tokens),
            stop_reason=speculative.stop_reason,
            accepted=speculative.accepted,
            drafted=sum(record.drafted for record in rounds),
            verified=sum(record.verified for record in rounds),
            draft_s=sum(record.draft_s for record in rounds),
            pack_s=sum(record.pack_s for record in rounds),
            verify_s=sum(record.verify_s for record in rounds),
            commit_s=sum(record.commit_s for record in rounds),
            speculative=_timing(speculative),
            baseline=_timing(baseline),
            identical=speculative.tokens == baseline.tokens,
            identical_to_generate=same,
        )


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


def _describe(
    target: FrozenTarget, drafter: Drafter | None, tree: TreePolicy | None, settings: Settings
) -> dict[str, Any]:
    return {
        **{f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in ("progress", "sampling")},
        **{f.name: getattr(settings.sampling, f.name) for f in fields(Sampling) if f.name != "processors"},
        "same_text_expected": settings.sampling.greedy or tree is None or not tree.samples,
        "tree": {"name": "none"} if tree is None else tree.settings(),
        "taps": [] if drafter is None else list(drafter.taps),
        "target": str(target.source),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
    }


def _versions() -> dict[str, str]:
    return {
        "eaglelab": getattr(eaglelab, "__version__", "unknown"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
