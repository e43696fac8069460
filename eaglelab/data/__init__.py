"""Data: conversations -> token ids and answer masks -> packed rows -> batches with their training plan."""

from eaglelab.data.batch import Batch
from eaglelab.data.chat import TokenizedChat, encode_prompt, tokenize_chat, with_chat_template
from eaglelab.data.conversations import Conversation, load_conversations, load_prompts
from eaglelab.data.loader import RowLoader, epoch_batches, epoch_order
from eaglelab.data.module import ConversationDataModule, DataReport, SplitReport, hold_out
from eaglelab.data.packing import PackedRow, PackedRows, collate, pack, select
from eaglelab.data.rows import Rows, SuperviseRule, compile_rows

__all__ = [
    "Batch",
    "Conversation",
    "ConversationDataModule",
    "DataReport",
    "PackedRow",
    "PackedRows",
    "RowLoader",
    "Rows",
    "SplitReport",
    "SuperviseRule",
    "TokenizedChat",
    "collate",
    "compile_rows",
    "encode_prompt",
    "epoch_batches",
    "epoch_order",
    "hold_out",
    "load_conversations",
    "load_prompts",
    "pack",
    "select",
    "tokenize_chat",
    "with_chat_template",
]
