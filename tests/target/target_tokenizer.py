"""A tiny byte-level BPE tokenizer made on the spot."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tiny_tokenizer(
    extra: Sequence[str] = (), merges: Sequence[tuple[str, str]] = (("h", "e"), ("l", "l"))
) -> PreTrainedTokenizerFast:
    pieces = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzĠ", "he", "ll", *extra]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges), unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['content'] }}</s>{% endfor %}",
    )
