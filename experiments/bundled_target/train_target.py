"""Train one candidate for the bundled target: a small Llama on GSM8K worked solutions.

    python experiments/bundled_target/train_target.py --tokenizer outputs/bundled_target/tokenizer \
        --out outputs/bundled_target/l12_d192 --layers 12 --hidden 192 --steps 4000

Run the same command again to resume after an interruption. The learning rate warms up, stays
constant and falls linearly to zero over the last `--decay` steps. `constant.pt` is the state just
before that fall: `--resume-from .../constant.pt --steps N` goes on from it to a longer run.

Letters: B chats, S tokens, d hidden.
"""

import argparse
import csv
import math
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from chat_data import GSM8K_TRAIN, IGNORE, NUM_HELD_OUT, ChatBatch, epoch_batches, read_jsonl, tokenise
from evaluate_target import answer_perplexity
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

LOG_FIELDS = ("step", "epoch", "tokens", "seconds", "lr", "train_loss", "held_out_ppl")


def build_model(args: argparse.Namespace, tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=math.ceil(args.hidden * 8 / 3 / 64) * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // args.head_dim,
        num_key_value_heads=args.hidden // args.head_dim,
        head_dim=args.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    # Each layer adds to the residual stream twice: shrink what it adds so the sum keeps its size.
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * args.layers))
            linear.register_forward_hook(lambda module, _, output: F.dropout(output, args.dropout, module.training))
    return model


def build_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norm scales."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embedding = [model.model.embed_tokens.weight]
    adamw = dict(lr=args.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    if args.optimizer == "adamw":
        groups = [dict(params=matrices, weight_decay=args.weight_decay), dict(params=embedding + norms)]
        optimizers = [torch.optim.AdamW(groups, **adamw)]
    else:
        muon = torch.optim.Muon(
            matrices,
            lr=args.muon_lr,
            weight_decay=args.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers = [muon, torch.optim.AdamW(embedding + norms, **adamw)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_factor(step: int, args: argparse.Namespace) -> float:
    return max(0.0, min(1.0, (step + 1) / args.warmup, (args.steps - step) / args.decay))


def next_token_loss(model: LlamaForCausalLM, batch: ChatBatch) -> Tensor:
    """Mean cross-entropy over every token of the chats, questions included."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BSd = model.model(input_ids=batch.tokens_BS, use_cache=False).last_hidden_state
        logits_BSV = F.linear(hidden_BSd[:, :-1], model.lm_head.weight)
    labels_BS = batch.labels_BS[:, 1:]
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORE)


def batch_stream(chats, args, pad_id: int, first_step: int):
    """Yield (step, epoch, batch) from `first_step` on; the stream depends on the seed alone."""
    step, epoch = 0, 0
    while True:
        for batch in epoch_batches(chats, args.batch_tokens, pad_id, args.multi_turn, args.seed, epoch):
            if step >= first_step:
                yield step, epoch, batch
            step += 1
        epoch += 1


def save_state(path: Path, model, optimizers, progress: dict) -> None:
    state = dict(
        model=model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in optimizers],
        rng=torch.get_rng_state(),
        progress=progress,
    )
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_state(path: Path, model, optimizers) -> dict:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    torch.set_rng_state(state["rng"])
    return state["progress"]


def export(model: LlamaForCausalLM, tokenizer_folder: Path, folder: Path) -> None:
    """Write the bf16 weights and the tokenizer as a folder that `from_pretrained` reads."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    copy.to(torch.bfloat16).save_pretrained(folder)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    rows = read_jsonl(args.data)
    chats = tokenise(rows[:-NUM_HELD_OUT], tokenizer)
    held_out = tokenise(rows[-NUM_HELD_OUT:], tokenizer)
    model = build_model(args, tokenizer).train()
    optimizers = build_optimizers(model, args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    progress = dict(step=0, tokens=0, seconds=0.0, best_ppl=float("inf"))
    last = args.out / "last.pt"
    start_from = last if last.exists() else args.resume_from
    if start_from:
        progress = load_state(start_from, model, optimizers)
    log_path = args.out / "training_log.csv"
    if not log_path.exists():
        with open(log_path, "w", newline="") as log:
            csv.writer(log).writerow(LOG_FIELDS)

    if args.compile:  # layer by layer: they share one graph, so it compiles once
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    bar = tqdm(total=args.steps, initial=progress["step"], mininterval=5, dynamic_ncols=True)
    losses: list[float] = []
    clock = time.perf_counter()
    for step, epoch, batch in batch_stream(chats, args, tokenizer.pad_token_id, progress["step"]):
        if step == args.steps - args.decay:
            save_state(args.out / "constant.pt", model, optimizers, progress | dict(step=step))
        if step == args.steps:
            break
        factor = lr_factor(step, args)
        loss = next_token_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()

        losses.append(loss.item())
        progress["step"] = step + 1
        progress["tokens"] += int((batch.labels_BS != IGNORE).sum())
        progress["seconds"] += time.perf_counter() - clock
        clock = time.perf_counter()
        bar.update()
        speed = progress["tokens"] / progress["seconds"]
        bar.set_postfix(loss=f"{loss:.3f}", tokens_s=f"{speed:,.0f}", refresh=False)

        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            # Perplexity is always that of the weights as they will be shipped.
            export(model, args.tokenizer, args.out / "latest")
            ppl = answer_perplexity(args.out / "latest", held_out).per_token
            train_loss = sum(losses) / len(losses)
            losses.clear()
            record = (step + 1, epoch, progress["tokens"], round(progress["seconds"], 1),
                      round(factor, 4), round(train_loss, 4), round(ppl, 4))  # fmt: skip
            with open(log_path, "a", newline="") as log:
                csv.writer(log).writerow(record)
            bar.write(" ".join(f"{name}={value}" for name, value in zip(LOG_FIELDS, record, strict=True)))
            if ppl < progress["best_ppl"]:
                progress["best_ppl"] = ppl
                export(model, args.tokenizer, args.out / "best")
            save_state(last, model, optimizers, progress)
            clock = time.perf_counter()
    bar.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=GSM8K_TRAIN, help="GSM8K train.jsonl")
    add("--tokenizer", type=Path, required=True, help="folder written by train_tokenizer.py")
    add("--out", type=Path, required=True, help="folder to write; an interrupted run resumes")
    add("--resume-from", type=Path, help="constant.pt of a shorter run")
    add("--layers", type=int, default=12)
    add("--hidden", type=int, default=192)
    add("--head-dim", type=int, default=64)
    add("--dropout", type=float, default=0.0, help="on what each block adds to the residual stream")
    add("--weight-decay", type=float, default=0.1)
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--muon-lr", type=float, default=6e-3)
    add("--adamw-lr", type=float, default=3e-3)
    add("--steps", type=int, default=4000)
    add("--warmup", type=int, default=50)
    add("--decay", type=int, default=200)
    add("--batch-tokens", type=int, default=4096, help="padding included")
    add("--multi-turn", type=float, default=0.1, help="share of the chats joined into 2 to 4 turns")
    add("--eval-every", type=int, default=250)
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--compile", action="store_true", help="torch.compile each decoder layer")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
