"""Host memory of each process while a sharded target is loaded: whole first, or in shares.

python experiments/launch/target_memory.py [processes]

Writes a random Llama in bfloat16 to a temporary folder, loads it both ways over gloo, in the type of its file and in
another one, and runs it once. Anonymous memory is what a process owns; pages of the mapped checkpoint are the page
cache's, shared by all processes and given up when memory is short.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eaglelab.target import FINAL, FrozenTarget, ShardedTarget

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
}
MIB = 2**20


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """The most anonymous memory since it was started, sampled every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = 0, False

    def run(self) -> None:
        while not self.over:
            self.most = max(self.most, anonymous())
            time.sleep(0.001)


def worker(rank: int, processes: int, port: int, folder: str, way: str, dtype: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "EAGLELAB_CACHE": folder}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=processes)
    before, peak = anonymous(), Peak()
    peak.start()
    target = (FrozenTarget if way == "whole" else ShardedTarget).load(folder, dtype=dtype)
    target.shard("cpu")
    target.features(torch.arange(16)[None], (FINAL,))
    peak.over = True
    peak.join()
    owned = [f"{size / MIB:6,.0f} MiB" for size in (peak.most - before, anonymous() - before)]
    print(f"{dtype:9} {way:7} rank {rank}: peak {owned[0]}, afterwards {owned[1]}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back at once, so that only what is used counts
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
        numbers = sum(p.numel() for p in model.parameters())
        outside = model.get_input_embeddings().weight.numel() * 2
        print(f"{2 * numbers / MIB:,.0f} MiB of bfloat16, {2 * outside / MIB:,.0f} of them embedding and head")
        model.save_pretrained(folder)
        del model
        for dtype in ("bfloat16", "float32"):
            for way in ("whole", "shares"):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", 0))
                    port = one.getsockname()[1]
                torch.multiprocessing.spawn(worker, (processes, port, folder, way, dtype), nprocs=processes)


if __name__ == "__main__":
    main()
