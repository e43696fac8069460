"""Train the bundled target's byte-level BPE tokenizer on GSM8K train text.

    python experiments/bundled_target/train_tokenizer.py --out outputs/bundled_target/tokenizer

Takes about five seconds. Every digit is a token of its own, so that numbers are spelled the same
way wherever they occur, and so is every line break, so that the line break that ends a chat header
can never merge with the first characters of the message.
"""

import argparse
from pathlib import Path

from chat_data import GSM8K_TRAIN, read_jsonl
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")

# The {% generation %} block tells `apply_chat_template(return_assistant_tokens_mask=True)` which
# tokens the assistant wrote: its text and the end-of-turn token, not the header.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- message['content'] + '<|im_end|>' -}}"
    "{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A fast tokenizer of exactly `vocab_size` tokens; any unicode text survives a round trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9\n]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The role names stand in every conversation, so the merges should know them too.
    headers = ["\n".join(ROLES)] * len(texts)
    bpe.train_from_iterator(texts + headers, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        padding_side="left",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=GSM8K_TRAIN, help="GSM8K train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=2048)
    args = parser.parse_args()

    texts = [text for row in read_jsonl(args.data) for text in (row["question"], row["answer"])]
    tokenizer = train_tokenizer(texts, args.vocab_size)
    assert len(tokenizer) == args.vocab_size
    tokenizer.save_pretrained(args.out)
    num_bytes = sum(len(text.encode()) for text in texts)
    num_tokens = sum(len(ids) for ids in tokenizer(texts)["input_ids"])
    print(f"{len(tokenizer)} tokens, {num_tokens:,} in the text, {num_bytes / num_tokens:.2f} bytes each")


if __name__ == "__main__":
    main()
