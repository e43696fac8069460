"""Perplexity per answer token, and bits per byte, of a target on GSM8K answers.

    python experiments/bundled_target/evaluate_target.py --model eaglelab/assets/target \
        --data ../shared/data/gsm8k/test.jsonl

Perplexity counts the tokens of the answer and its end-of-turn token, each predicted from the
question and the answer so far. Bits per byte is the same sum of surprise (end-of-turn included)
over the UTF-8 bytes of the answers, so vocabularies of different sizes can be compared.
The bf16 weights are computed with in fp32.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from chat_data import Chat, batches_by_length, collate, read_jsonl, tokenise
from transformers import AutoModelForCausalLM, AutoTokenizer


class Surprise(NamedTuple):
    nats: float
    tokens: int

    @property
    def per_token(self) -> float:
        return math.exp(self.nats / self.tokens)

    def bits_per_byte(self, num_bytes: int) -> float:
        return self.nats / math.log(2) / num_bytes


@torch.inference_mode()
def answer_perplexity(folder: Path, chats: list[Chat], tokens_per_batch: int = 8192) -> Surprise:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nats, tokens = 0.0, 0
    for group in batches_by_length(chats, tokens_per_batch):
        batch = collate(group, model.config.pad_token_id)
        answer_BS = batch.answer_BS[:, 1:]
        hidden_BSd = model.model(input_ids=batch.tokens_BS).last_hidden_state[:, :-1]
        logits_NV = model.lm_head(hidden_BSd[answer_BS])
        nats += F.cross_entropy(logits_NV, batch.tokens_BS[:, 1:][answer_BS], reduction="sum").item()
        tokens += int(answer_BS.sum())
    return Surprise(nats, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with model and tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K test.jsonl")
    parser.add_argument("--limit", type=int, help="first rows only")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    rows = read_jsonl(args.data)[: args.limit]
    surprise = answer_perplexity(args.model, tokenise(rows, AutoTokenizer.from_pretrained(args.model)))
    bits = surprise.bits_per_byte(sum(len(row["answer"].encode()) for row in rows))
    print(
        f"{len(rows)} answers, {surprise.tokens:,} tokens: "
        f"perplexity {surprise.per_token:.3f} per token, {bits:.4f} bits per byte"
    )


if __name__ == "__main__":
    main()
