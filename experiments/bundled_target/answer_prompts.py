"""Let the target answer GSM8K questions greedily: the drafters' default training data.

    python experiments/bundled_target/answer_prompts.py --model eaglelab/assets/target \
        --train ../shared/data/gsm8k/train.jsonl --test ../shared/data/gsm8k/test.jsonl \
        --out eaglelab/assets/data

Writes train.jsonl and val.jsonl (questions of the train split, answers by the target) and
eval.jsonl (questions of the test split with their reference answers, for evaluation only).

Letters: B rows of a batch, S prompt tokens (left-padded), V vocabulary.
"""

import argparse
import json
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import torch
from chat_data import NUM_HELD_OUT, read_jsonl
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils.logging import disable_progress_bar

SHRINK_EVERY = 8  # decoding steps between removals of finished rows from the batch


class PreallocatedLayer(DynamicLayer):
    """The K/V of one layer, written into a buffer instead of copied to a longer one every step."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch, heads, _, head_dim = key_states.shape
            self.buffers = key_states.new_empty(2, batch, heads, self.capacity, head_dim)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        self.buffers[0, :, :, start:end] = key_states
        self.buffers[1, :, :, start:end] = value_states
        self.keys, self.values = self.buffers[:, :, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices):
        end = self.get_seq_length()
        self.buffers = self.buffers[:, indices]
        self.keys, self.values = self.buffers[:, :, :, :end]


@torch.inference_mode()
def greedy_answers(model, tokenizer, questions: list[str], max_new_tokens: int) -> list[list[int]]:
    """The ids generated for each question, up to and including the end-of-turn token if it came."""
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens_BN, mask_BS = prompts["input_ids"], prompts["attention_mask"]
    position_BN = (mask_BS.cumsum(1) - 1).clamp(min=0)
    capacity = mask_BS.shape[1] + max_new_tokens
    cache = Cache(layers=[PreallocatedLayer(capacity) for _ in model.model.layers])
    answers: list[list[int]] = [[] for _ in questions]
    row_of_B = torch.arange(len(questions))
    for step in range(max_new_tokens):
        logits_BV = model(
            input_ids=tokens_BN,
            attention_mask=mask_BS,
            position_ids=position_BN,
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        next_B = logits_BV.argmax(-1)
        for row, token in zip(row_of_B.tolist(), next_B.tolist(), strict=True):
            if answers[row][-1:] != [tokenizer.eos_token_id]:
                answers[row].append(token)
        tokens_BN, position_BN = next_B[:, None], position_BN[:, -1:] + 1
        mask_BS = torch.cat([mask_BS, torch.ones_like(tokens_BN)], dim=1)
        if step % SHRINK_EVERY == SHRINK_EVERY - 1:
            open_rows = [answers[row][-1] != tokenizer.eos_token_id for row in row_of_B.tolist()]
            keep = torch.tensor(open_rows).nonzero().flatten()
            if not len(keep):
                break
            if len(keep) < len(row_of_B):
                cache.batch_select_indices(keep)
                row_of_B, mask_BS = row_of_B[keep], mask_BS[keep]
                tokens_BN, position_BN = tokens_BN[keep], position_BN[keep]
    return answers


def fault_of(conversation: dict, answer_ids: list[int], tokenizer) -> str | None:
    """Why a conversation must be dropped, or None."""
    if answer_ids[-1] != tokenizer.eos_token_id:
        return "did not end"
    encoded = tokenizer.apply_chat_template(
        conversation["messages"], return_assistant_tokens_mask=True, return_dict=True
    )
    masks = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    if [token for token, is_answer in masks if is_answer] != answer_ids:
        return "text tokenises differently"
    return None


@cache
def load_target(folder: Path):
    torch.set_num_threads(1)
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def answer_batch(folder: Path, batch: list[tuple[int, str]], max_new_tokens: int):
    """(number, conversation, fault, token count) for each numbered question; runs in a worker."""
    model, tokenizer = load_target(folder)
    answers = greedy_answers(model, tokenizer, [question for _, question in batch], max_new_tokens)
    results = []
    for (number, question), ids in zip(batch, answers, strict=True):
        text = tokenizer.decode([token for token in ids if token != tokenizer.eos_token_id])
        conversation = {
            "id": f"gsm8k-train-{number}",
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": text},
            ],
        }
        results.append((number, conversation, fault_of(conversation, ids, tokenizer), len(ids)))
    return results


def answer_all(questions: list[tuple[int, str]], args) -> tuple[list[dict], Counter]:
    """The conversations kept, in order, and how many were kept or dropped, and why."""
    by_length = sorted(questions, key=lambda item: len(item[1]))
    batches = [by_length[start : start + args.batch_size] for start in range(0, len(by_length), args.batch_size)]
    kept, counts, num_tokens, started = {}, Counter(), 0, time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=spawn) as pool:
        futures = [pool.submit(answer_batch, args.model, batch, args.max_new_tokens) for batch in batches]
        bar = tqdm(futures, mininterval=5)
        for future in bar:
            for number, conversation, fault, length in future.result():
                num_tokens += length
                counts[fault or "kept"] += 1
                if fault is None:
                    kept[number] = conversation
            bar.set_postfix(tokens_s=f"{num_tokens / (time.perf_counter() - started):,.0f}")
    return [kept[number] for number in sorted(kept)], counts


def write_jsonl(path: Path, rows: list[dict]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def evaluation_rows(test: list[dict]) -> list[dict]:
    return [
        {
            "question_id": number,
            "category": "math",
            "turns": [row["question"]],
            "reference": [row["answer"]],
        }
        for number, row in enumerate(test)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder with model and tokenizer")
    add("--train", type=Path, required=True, help="GSM8K train.jsonl")
    add("--test", type=Path, required=True, help="GSM8K test.jsonl")
    add("--out", type=Path, required=True, help="folder to write")
    add("--num-train", type=int, default=4200, help="questions asked for train.jsonl")
    add("--num-eval", type=int, default=200)
    add("--max-new-tokens", type=int, default=256)
    add("--batch-size", type=int, default=128)
    add("--workers", type=int, default=2, help="processes of one thread each")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    questions = [(number, row["question"]) for number, row in enumerate(read_jsonl(args.train))]
    # val.jsonl asks what the target has never seen either: its own held-out rows.
    parts = {"train": questions[:-NUM_HELD_OUT][: args.num_train], "val": questions[-NUM_HELD_OUT:]}
    for name, part in parts.items():
        conversations, counts = answer_all(part, args)
        write_jsonl(args.out / f"{name}.jsonl", conversations)
        print(f"{name}.jsonl: {len(part)} questions, {dict(counts)}")
    write_jsonl(args.out / "eval.jsonl", evaluation_rows(read_jsonl(args.test)[: args.num_eval]))


if __name__ == "__main__":
    main()
