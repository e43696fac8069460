"""Our side: decode held-out prompts with a chain of 3 in fp32 and note ids, answers and accepted tokens.

    python experiments/clients/ours.py RUN OUT.json [prompts] [max_new_tokens]

Also writes OUT.safetensors for an EAGLE-3 run: taps, tokens and logits of three rollout steps over one prompt with its
answer, for with_speculators.py.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from eaglelab.assets import bundled_data
from eaglelab.data import encode_prompt
from eaglelab.data.rows import compile_rows
from eaglelab.decoding import Chain, Engine
from eaglelab.drafters import FusedDrafter, RolloutContext, SlotDrafter
from eaglelab.evaluation import load_prompts
from eaglelab.training.run_folder import RunFolder

DEPTH, ROLLOUT_STEPS = 3, 3


@torch.no_grad()
def rollout(drafter: SlotDrafter, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Row t reads the taps of token t and the token after it; step s reads its own state and the token after that."""
    network, target = drafter.network, drafter.target
    tokens_1S = torch.tensor([tokens])
    features = target.features(tokens_1S, drafter.taps)
    taps_1SF = torch.cat([features[tap] for tap in drafter.taps], dim=-1)
    S = len(tokens) - ROLLOUT_STEPS
    whole = torch.ones(1, S + 1, dtype=torch.bool)
    rows = compile_rows(whole, torch.zeros(1, S + 1, dtype=torch.long), torch.arange(S + 1)[None], whole)
    context, state = RolloutContext(rows), network.fuse(taps_1SF[:, :S])
    logits = []
    for step in range(ROLLOUT_STEPS):
        attend = context.own if step else context.native
        embedding = target.embed(tokens_1S[:, 1 + step : 1 + step + S])
        state = network(state, embedding, torch.arange(S)[None] + step, attend)
        logits.append(network.logits(state, target.lm_head))
    return {"taps": taps_1SF[:, :S].contiguous(), "tokens": tokens_1S, "logits": torch.cat(logits)}


def main(run: str, out: str, prompts: int = 20, max_new_tokens: int = 128) -> None:
    folder = RunFolder.existing(run)
    target = folder.load_target(dtype="float32")
    drafter = folder.load_drafter(target)
    drafting, plain = Engine(target, drafter, Chain(DEPTH)), Engine(target, None, None)
    answers = []
    for prompt in load_prompts(bundled_data("eval"), limit=prompts):
        ids = encode_prompt(target.tokenizer, prompt.messages[:1])
        result = drafting.generate_one(ids, max_new_tokens=max_new_tokens)
        assert result.tokens == plain.generate_one(ids, max_new_tokens=max_new_tokens).tokens
        reached = [record.reached for record in result.rounds]
        answers.append({"prompt": ids, "answer": result.tokens, "accepted": result.accepted, "reached": reached})
    rounds = sum(len(one["accepted"]) for one in answers)
    totals = {name: sum(sum(one[name]) for one in answers) for name in ("accepted", "reached")}
    by_depth = [sum(k <= n for one in answers for n in one["reached"]) / rounds for k in range(1, DEPTH + 1)]
    summary = {
        "variant": folder.manifest().variant,
        "depth": DEPTH,
        "rounds": rounds,
        "tau": 1 + totals["accepted"] / rounds,
        "tau_with_unpublished": 1 + totals["reached"] / rounds,
        "accepted_by_depth": by_depth,
        "max_new_tokens": max_new_tokens,
        "answers": answers,
    }
    Path(out).write_text(json.dumps(summary) + "\n")
    print({k: v for k, v in summary.items() if k != "answers"})
    if isinstance(drafter.network, FusedDrafter):
        save_file(
            rollout(drafter, [*answers[0]["prompt"], *answers[0]["answer"]]), str(Path(out).with_suffix(".safetensors"))
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
