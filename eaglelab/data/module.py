"""The data module: files in, batches out, with a report of what happened in between."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eaglelab.data.chat import TokenizedChat, tokenize_chat, with_chat_template
from eaglelab.data.conversations import Conversation, Paths, load_conversations
from eaglelab.data.loader import Position, RowLoader
from eaglelab.data.packing import Overlength, PackedRows, pack, select, supervised_rows
from eaglelab.data.rows import SuperviseRule

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SplitReport:
    """What became of the conversations of one split.

    Attributes:
        read, kept: conversations.
        dropped: conversations left out, per reason (``too_long``, ``no_supervised_row``).
        truncated: kept conversations that lost their end.
        tokens: tokens of the kept conversations.
        answer_tokens: of these, inside assistant answers.
        supervised_rows: rows that enter the loss in one epoch.
        rows: packed rows.
        padding_share: padding of all token slots, 0..1 (without packing: as if all rows were padded alike).
    """

    read: int
    kept: int
    dropped: dict[str, int]
    truncated: int
    tokens: int
    answer_tokens: int
    supervised_rows: int
    rows: int
    padding_share: float

    def __str__(self) -> str:
        lost = "".join(f", {count:,} {reason.replace('_', ' ')}" for reason, count in self.dropped.items())
        cut = f", {self.truncated:,} truncated" if self.truncated else ""
        return (
            f"{self.kept:,} of {self.read:,} conversations{lost}{cut}; {self.tokens:,} tokens, "
            f"{self.supervised_rows:,} supervised rows, {self.rows:,} sequences, "
            f"{self.padding_share:.1%} padding"
        )


@dataclasses.dataclass(frozen=True)
class DataReport:
    """Counts of the training split and, if there is one, the validation split."""

    train: SplitReport
    val: SplitReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"train: {self.train}" + (f" | val: {self.val}" if self.val else "")


class PackedDataModule(L.LightningDataModule):
    """Packed rows of a training and a validation split, in an order that is resumed exactly.

    Subclasses say in :meth:`setup` what the rows are.

    Args:
        batch_size: packed rows per process and step.
        supervise: which rows enter the loss, see :func:`~eaglelab.data.rows.compile_rows`.
        seed: order of the training rows.
        num_workers: worker processes for collation.

    Attributes:
        padded_length: tokens per padded row; None pads each batch to its longest row.
        looks_ahead: whether training batches come with the ones that follow (:mod:`eaglelab.data.loader`).
        report: counts, after :meth:`setup`.

    Raises:
        ValueError: a batch size below 1, or a negative number of workers.
    """

    padded_length: int | None = None

    def __init__(self, *, batch_size: int, supervise: SuperviseRule, seed: int, num_workers: int):
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} makes no batch; use at least 1")
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers}: use 0 for none, or how many processes collate batches")
        self.batch_size, self.supervise, self.seed, self.num_workers = batch_size, supervise, seed, num_workers
        self.looks_ahead = False
        self._splits: tuple[PackedRows, PackedRows | None] | None = None
        self._report: DataReport | None = None

    @property
    def report(self) -> DataReport:
        """Counts of the prepared data."""
        assert self._report is not None, "call setup() first"
        return self._report

    @property
    def train_rows(self) -> PackedRows:
        """The packed training rows."""
        assert self._splits is not None, "call setup() first"
        return self._splits[0]

    @property
    def val_rows(self) -> PackedRows | None:
        """The packed validation rows, None without validation."""
        assert self._splits is not None, "call setup() first"
        return self._splits[1]

    def answer_counts(self, vocab_size: int) -> Tensor:
        """int64 [vocab_size], how often each token occurs inside the answers of the training split."""
        rows = self.train_rows
        return torch.from_numpy(np.bincount(rows.tokens_T[rows.answer_T], minlength=vocab_size))

    def train_dataloader(self) -> RowLoader:
        return self._loader(self.train_rows, self.seed)

    def val_dataloader(self) -> RowLoader | list[Any]:
        return self._loader(self.val_rows, None) if self.val_rows is not None else []

    def state_dict(self) -> dict[str, Any]:
        return self.train_dataloader().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses a checkpoint whose data position means something else here.

        Raises:
            ValueError: other data, seed, or rows per global batch (batch size times processes).
        """
        self.setup("fit")
        self.train_dataloader().load_state_dict(state_dict)

    @property
    def _is_first_process(self) -> bool:
        return self.trainer is None or self.trainer.is_global_zero

    def _loader(self, rows: PackedRows, seed: int | None) -> RowLoader:
        trainer = self.trainer
        return RowLoader(
            rows,
            batch_size=self.batch_size,
            row_length=self.padded_length,
            supervise=self.supervise,
            seed=seed,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
            num_workers=self.num_workers,
            position=self._position if seed is not None else lambda: (0, 0),
            looks_ahead=self.looks_ahead and seed is not None,
        )

    def _position(self) -> Position:
        """(epoch, batches done in it) of the training loop, which Lightning saves and restores."""
        trainer = self.trainer
        if trainer is None:
            return 0, 0
        epoch = 0 if getattr(trainer, "overfit_batches", 0) else trainer.current_epoch
        return epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready


class ConversationDataModule(PackedDataModule):
    """Conversations, tokenized with the target's chat template and packed into isolated segments.

    Args:
        tokenizer: the target's.
        train: files, folders or hub names (see :func:`~eaglelab.data.conversations.load_conversations`), or
            conversations in memory.
        val: the same for validation; None takes ``val_fraction`` of ``train``.
        val_fraction: share of conversations held out when ``val`` is None. Which ones depends on the prompts
            only, neither on the seed nor on file order, and equal prompts stay on one side.
        max_length: tokens per conversation.
        row_length: tokens per packed row; None means ``max_length``.
        batch_size: packed rows per process and step.
        packing: several conversations per row; False gives one each, padded to the longest of the batch.
        overlength: ``drop`` or ``truncate`` conversations longer than ``max_length``.
        supervise: which rows enter the loss, see :func:`~eaglelab.data.rows.compile_rows`.
        seed: order of the training rows.
        num_workers: worker processes for collation.
        limit: first conversations of ``train`` to use.
        val_limit: first conversations of ``val`` to use; without ``val``, hold out about this many at most.
        chat_template: Jinja file that replaces the tokenizer's template.

    Attributes:
        looks_ahead: whether training batches come with the ones that follow (:mod:`eaglelab.data.loader`).
        report: counts, after :meth:`setup`.

    Raises:
        ValueError: from :meth:`setup`, for bad files, or when no conversation is left.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        train: Paths | Sequence[Conversation],
        val: Paths | Sequence[Conversation] | None = None,
        *,
        val_fraction: float = 0.0,
        max_length: int = 2048,
        row_length: int | None = None,
        batch_size: int = 4,
        packing: bool = True,
        overlength: Overlength = "drop",
        supervise: SuperviseRule = "advanced",
        seed: int = 0,
        num_workers: int = 0,
        limit: int | None = None,
        val_limit: int | None = None,
        chat_template: str | Path | None = None,
    ):
        super().__init__(batch_size=batch_size, supervise=supervise, seed=seed, num_workers=num_workers)
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must be in [0, 1); 0 holds nothing out")
        if val_limit is not None and val_limit < 1:
            raise ValueError(f"val_limit={val_limit} keeps no conversation; use at least 1, or null for all")
        if row_length is not None and row_length < max_length and packing:
            raise ValueError(
                f"row_length={row_length} is shorter than max_length={max_length}, so a conversation may fit "
                "no row; lower max_length or raise row_length"
            )
        self.tokenizer = with_chat_template(tokenizer, chat_template) if chat_template else tokenizer
        self.train, self.val, self.val_fraction = train, val, val_fraction
        self.max_length, self.row_length = max_length, row_length or max_length
        self.packing, self.overlength = packing, overlength
        self.padded_length = self.row_length if packing else None
        self.limit, self.val_limit = limit, val_limit

    def setup(self, stage: str | None = None) -> None:
        """Read, tokenize and pack once; later calls do nothing."""
        if self._splits is not None:
            return
        train = _conversations(self.train, self.limit)
        val = None if self.val is None else _conversations(self.val, self.val_limit)
        if val is None and self.val_fraction:
            most = 1.0 if self.val_limit is None else self.val_limit / len(train)
            train, val = hold_out(train, min(self.val_fraction, most))
        train_rows, train_report = self._prepare(train, "train")
        val_rows, val_report = self._prepare(val, "val") if val is not None else (None, None)
        self._splits = train_rows, val_rows
        self._report = DataReport(train_report, val_report)
        if self._is_first_process:
            log.info("%s", self._report)

    def _prepare(self, conversations: Sequence[Conversation], split: str) -> tuple[PackedRows, SplitReport]:
        chats = self._tokenize(conversations, split)
        kept, dropped, truncated = select(chats, self.max_length, self.overlength, self.supervise)
        if not kept:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none was read"
            raise ValueError(
                f"no conversation is left in the {split} data ({reasons}; max_length={self.max_length}, "
                f"overlength={self.overlength}); raise max_length or set overlength=truncate"
            )
        lengths = [len(chat) for chat in kept]
        plan = pack(lengths, self.row_length) if self.packing else [[i] for i in range(len(kept))]
        slots = len(plan) * (self.row_length if self.packing else max(lengths))
        return PackedRows.build(kept, plan), SplitReport(
            read=len(conversations),
            kept=len(kept),
            dropped=dict(sorted(dropped.items())),
            truncated=truncated,
            tokens=sum(lengths),
            answer_tokens=sum(int(chat.answer_mask.sum()) for chat in kept),
            supervised_rows=sum(supervised_rows(chat.answer_mask, self.supervise) for chat in kept),
            rows=len(plan),
            padding_share=1 - sum(lengths) / slots,
        )

    def _tokenize(self, conversations: Sequence[Conversation], split: str) -> list[TokenizedChat]:
        bar = tqdm(
            conversations,
            desc=f"tokenize {split}",
            unit=" chats",
            delay=2,  # seconds: short jobs stay silent
            leave=False,
            disable=None if self._is_first_process else True,  # None: off when the output is not a terminal
        )
        chats = []
        for conversation in bar:
            try:
                chats.append(tokenize_chat(self.tokenizer, conversation.messages))
            except ValueError as error:
                raise ValueError(f"conversation {conversation.id}: {error}") from error
        return chats


def hold_out(conversations: Sequence[Conversation], fraction: float) -> tuple[list[Conversation], list[Conversation]]:
    """Split off about ``fraction`` of the conversations, chosen by a digest of their prompts.

    At least one conversation is on each side; equal prompts are on the same side.

    Raises:
        ValueError: all conversations have the same prompt.
    """
    digests = [_prompt_digest(conversation) for conversation in conversations]
    ranked = sorted(digests)
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        raise ValueError(
            f"val_fraction={fraction} needs at least two different prompts, the data has {len(distinct)}; "
            "set val_fraction=0 or name a validation file"
        )
    last = min(ranked[max(round(fraction * len(ranked)), 1) - 1], distinct[-2])
    train = [c for c, digest in zip(conversations, digests) if digest > last]
    return train, [c for c, digest in zip(conversations, digests) if digest <= last]


def _prompt_digest(conversation: Conversation) -> str:
    digest = hashlib.sha256()
    for message in conversation.messages:
        if message["role"] == "assistant":
            break
        digest.update(f"{message['role']}\0{message['content']}\0".encode())
    return digest.hexdigest()


def _conversations(source: Paths | Sequence[Conversation], limit: int | None) -> list[Conversation]:
    in_memory = not isinstance(source, str | Path) and any(isinstance(entry, Conversation) for entry in source)
    if in_memory:
        return list(cast("Sequence[Conversation]", source))[:limit]
    return load_conversations(cast("Paths", source), limit)
