"""How many tokens, rows and batches the data makes, counted or from a sample.

Letters: B sequences, S tokens, R rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from eaglelab.data import load_conversations, pack, select, tokenize_chat, with_chat_template
from eaglelab.data.packing import supervised_rows
from eaglelab.drafters.native import FLASH_BLOCK, MASKED_ROWS
from eaglelab.target.unpacking import MASKED_LENGTH
from eaglelab.training.flops import Load

REPEATS = 20
ASSUMED_PADDING = 0.03


@dataclasses.dataclass(frozen=True)
class DataFigures:
    """One epoch of the training split.

    Attributes:
        conversations: in the data, held-out ones left out.
        sampled: of these, how many were tokenized; 0: nothing was, the figures are as told.
        tokens: of the kept conversations; spread: half of its 95 % interval, 0 where all were counted.
        supervised: rows in the loss.
        kept_share: of the conversations, after ``max_length``.
        rows: packed rows, that is, sequences.
        padding_share: of all token slots.
        segments: conversations in a row, mean.
        length: S of a batch, mean; longest: the largest.
        supervised_most: supervised rows of one sequence, the most seen.
        packed: several segments in a row.
    """

    conversations: float
    sampled: int
    tokens: float
    spread: float
    supervised: float
    kept_share: float
    rows: float
    padding_share: float
    segments: float
    length: float
    longest: int
    supervised_most: int
    packed: bool

    @property
    def segment_length(self) -> float:
        """Tokens of a conversation, mean."""
        return self.tokens / max(self.rows * self.segments, 1e-9)

    def load(self, batch_size: int, *, cpu: bool, largest: bool = False) -> Load:
        """A mean micro-batch, or the largest one."""
        length = self.longest if largest else round(self.length)
        rows = max(length - max(round(self.segments), 1), 1)
        each = self.supervised_most if largest else self.supervised / max(self.rows, 1e-9)
        return Load(
            batch_size,
            length,
            rows,
            supervised=max(min(round(batch_size * each), batch_size * rows), 1),
            span=_span(rows, self.segment_length, FLASH_BLOCK if cpu else MASKED_ROWS) if self.packed else None,
            target_span=min(length, self.segment_length) if self.packed and length > MASKED_LENGTH else None,
            packed=self.packed,
            roots=max(min(math.ceil(each), rows), 1),
            reach=max(self.segments, 1.0),
        )


def _span(rows: int, segment: float, block: int) -> float | None:
    """Keys per row of packed rows: all of a short row's, a block and the segment that it begins in of a long one's."""
    return None if rows <= MASKED_ROWS else min(rows, block + segment)


def count_data(config: DictConfig, tokenizer: Any) -> DataFigures:
    """Tokens, rows and padding of the data; ``sample`` conversations stand for all.

    Raises:
        ValueError: neither readable data with a tokenizer nor ``data_tokens``.
    """
    data = OmegaConf.to_container(config.data, resolve=False)
    assert isinstance(data, dict)
    if config.data_tokens is not None:
        return _told(config)
    if tokenizer is None:
        raise ValueError("a target known by its shape has no tokenizer; tell the size of the data with data_tokens=N")
    conversations = load_conversations(config.data.path, config.data.limit)
    if config.data.get("chat_template"):
        tokenizer = with_chat_template(tokenizer, config.data.chat_template)
    count = len(conversations)
    chosen = np.random.default_rng(0).permutation(count)[: config.sample]
    chats = [tokenize_chat(tokenizer, conversations[i].messages) for i in sorted(chosen)]
    held_out = 0.0 if config.data.val_path is not None else float(config.data.val_fraction or 0)
    return figures_of(
        chats, count * (1 - held_out), config.data, config.variant.supervise, exact=len(chats) == count and not held_out
    )


def figures_of(
    chats: Sequence[Any], conversations: float, data: DictConfig, supervise: Any, *, exact: bool
) -> DataFigures:
    """Figures of ``conversations`` conversations that are like ``chats``.

    Raises:
        ValueError: none of them is kept.
    """
    kept, dropped, _ = select(chats, data.max_length, data.overlength, supervise)
    if not kept:
        reasons = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in dropped.items())
        raise ValueError(
            f"no conversation of {len(chats)} is left ({reasons}; data.max_length={data.max_length}); raise "
            "data.max_length or set data.overlength=truncate"
        )
    lengths = np.array([len(chat) for chat in kept])
    answers = np.array([supervised_rows(chat.answer_mask, supervise) for chat in kept])
    scale = conversations / len(chats)
    tokens_each = np.zeros(len(chats))
    tokens_each[: len(kept)] = lengths
    error = 0.0 if exact else 1.96 * float(tokens_each.std(ddof=1 if len(chats) > 1 else 0)) / len(chats) ** 0.5
    rows = _packed(lengths, answers, data, scale) if data.packing else _unpacked(lengths, answers, data.batch_size)
    return DataFigures(
        conversations=conversations,
        sampled=len(chats),
        tokens=float(lengths.sum()) * scale,
        spread=error * conversations,
        supervised=float(answers.sum()) * scale,
        kept_share=len(kept) / len(chats),
        rows=rows.pop("rows_per_chat") * len(kept) * scale,
        packed=bool(data.packing),
        **rows,
    )


def _packed(lengths: Any, answers: Any, data: DictConfig, scale: float) -> dict[str, Any]:
    """Packing more conversations wastes less, so the sample is repeated up to the size of the data."""
    repeats = max(1, min(round(scale), REPEATS))
    many, many_answers = np.tile(lengths, repeats), np.tile(answers, repeats)
    plan = pack(many.tolist(), data.row_length)
    return {
        "rows_per_chat": len(plan) / len(many),
        "padding_share": 1 - float(many.sum()) / (len(plan) * data.row_length),
        "segments": len(many) / len(plan),
        "length": float(data.row_length),
        "longest": int(data.row_length),
        "supervised_most": max(int(many_answers[row].sum()) for row in plan),
    }


def _unpacked(lengths: Any, answers: Any, batch_size: int) -> dict[str, Any]:
    """One conversation per row, padded to the longest of its batch."""
    drawn = np.random.default_rng(0).choice(lengths, (1000, batch_size)).max(1).mean()
    return {
        "rows_per_chat": 1.0,
        "padding_share": 1 - float(lengths.mean() / drawn),
        "segments": 1.0,
        "length": float(drawn),
        "longest": int(lengths.max()),
        "supervised_most": int(answers.max()),
    }


def _told(config: DictConfig) -> DataFigures:
    """From ``data_tokens``; lengths, answers and padding are assumed as the settings say."""
    tokens, data = float(config.data_tokens), config.data
    if tokens < 1:
        raise ValueError(f"data_tokens={config.data_tokens} is no number of tokens")
    if not 0 < config.answer_share <= 1:
        raise ValueError(f"answer_share={config.answer_share} must be above 0 and at most 1")
    each = min(float(config.conversation_tokens), float(data.max_length))
    padding = ASSUMED_PADDING if data.packing else 0.0
    length = int(data.row_length if data.packing else each)
    rows = tokens / (length * (1 - padding))
    return DataFigures(
        conversations=tokens / each,
        sampled=0,
        tokens=tokens,
        spread=0.0,
        supervised=tokens * config.answer_share,
        kept_share=1.0,
        rows=rows,
        padding_share=padding,
        segments=tokens / each / rows,
        length=float(length),
        longest=int(data.row_length if data.packing else data.max_length),
        supervised_most=int((data.row_length if data.packing else data.max_length) * min(1.2 * config.answer_share, 1)),
        packed=bool(data.packing),
    )
