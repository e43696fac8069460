"""GSM8K as tokenised chats, in batches of near-equal length.

Letters: B chats in a batch, S tokens of the longest of them (right-padded).

A row holds one chat, so positions start at 0 and attention stays inside the chat with the plain
causal mask; sorting by length keeps the padding below a few per cent.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

GSM8K_TRAIN = Path("../shared/data/gsm8k/train.jsonl")
NUM_HELD_OUT = 200  # the last rows of the train split choose the checkpoint and are never trained on
IGNORE = -100


class Chat(NamedTuple):
    ids: Tensor  # [S]
    answer: Tensor  # [S] bool: text and end-of-turn token of an assistant message


class ChatBatch(NamedTuple):
    tokens_BS: Tensor
    labels_BS: Tensor  # the token itself, IGNORE on padding
    answer_BS: Tensor


def read_jsonl(path: Path) -> list[dict]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def as_messages(row: dict) -> list[dict]:
    """The GSM8K row as one user turn and one assistant turn, text unchanged."""
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": row["answer"]},
    ]


def tokenise(rows: list[dict], tokenizer) -> list[Chat]:
    encoded = tokenizer.apply_chat_template(
        [as_messages(row) for row in rows],
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    return [
        Chat(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool))
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    ]


def join_turns(chats: list[Chat], share: float, generator: torch.Generator) -> list[Chat]:
    """Join about `share` of the chats into chats of two to four turns, the rest stay alone."""
    order = torch.randperm(len(chats), generator=generator).tolist()
    num_joined = int(share * len(chats))
    joined, alone = order[:num_joined], order[num_joined:]
    result = [chats[i] for i in alone]
    while joined:
        turns = int(torch.randint(2, 5, (), generator=generator))
        group, joined = joined[:turns], joined[turns:]
        result.append(Chat(torch.cat([chats[i].ids for i in group]), torch.cat([chats[i].answer for i in group])))
    return result


def collate(chats: list[Chat], pad_id: int) -> ChatBatch:
    longest = max(len(chat.ids) for chat in chats)
    tokens_BS = torch.full((len(chats), longest), pad_id)
    labels_BS = torch.full((len(chats), longest), IGNORE)
    answer_BS = torch.zeros(len(chats), longest, dtype=torch.bool)
    for row, chat in enumerate(chats):
        length = len(chat.ids)
        tokens_BS[row, :length] = labels_BS[row, :length] = chat.ids
        answer_BS[row, :length] = chat.answer
    return ChatBatch(tokens_BS, labels_BS, answer_BS)


def batches_by_length(chats: list[Chat], tokens_per_batch: int) -> list[list[Chat]]:
    """Sort by length and cut so that no batch exceeds `tokens_per_batch`, padding included."""
    batches, current = [], []
    for chat in sorted(chats, key=lambda chat: len(chat.ids)):
        if current and (len(current) + 1) * len(chat.ids) > tokens_per_batch:
            batches.append(current)
            current = []
        current.append(chat)
    return [*batches, current]


def epoch_batches(
    chats: list[Chat], tokens_per_batch: int, pad_id: int, multi_turn: float, seed: int, epoch: int
) -> Iterator[ChatBatch]:
    """The batches of one epoch, a function of (seed, epoch) only, so a run can resume inside it.

    Each group of 1,500 shuffled chats is sorted by length on its own: whose company a chat is
    trained in changes from epoch to epoch, and its length is no longer tied to a step.
    """
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    chats = join_turns(chats, multi_turn, generator)
    order = torch.randperm(len(chats), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), 1500):
        group = [chats[i] for i in order[start : start + 1500]]
        batches += batches_by_length(group, tokens_per_batch)
    for index in torch.randperm(len(batches), generator=generator).tolist():
        yield collate(batches[index], pad_id)
