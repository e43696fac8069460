"""vLLM serves the target plainly and with a drafter of ours; ids and acceptance against ours.py.

    VENV/bin/python experiments/clients/with_vllm.py TARGET DRAFTER OURS.json OUT.json [method]

Runs in vLLM's own environment (see README.md); knows nothing of eaglelab. ``method`` is eagle or eagle3; without it the
drafter's folder is served as it is and must name its target itself (speculators format).
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams, TokensPrompt

DEPTH = 3
COMMON = {
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "max_num_seqs": 1,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
    "distributed_executor_backend": "uni",
}
DETAILED = {"per_request_spec_decode_metrics": "detailed"}


def answer(llm: LLM, ours: dict) -> tuple[list[list[int]], list[list[int]]]:
    """Answers as ids, and the draft tokens accepted in each of their rounds."""
    sampling = SamplingParams(temperature=0.0, max_tokens=ours["max_new_tokens"])
    prompts = [TokensPrompt(prompt_token_ids=one["prompt"]) for one in ours["answers"]]
    outputs = [out.outputs[0] for out in llm.generate(prompts, sampling, use_tqdm=False)]
    metrics = [getattr(one, "spec_decode_metrics", None) for one in outputs]
    return [list(one.token_ids) for one in outputs], [list(one.per_step_accepted) if one else [] for one in metrics]


def same_rounds(theirs: list[list[int]], ours: dict) -> dict:
    """Rounds that accept as many tokens as ours. The last round of an answer is apart: it may end inside a path."""
    pairs = list(zip(theirs, (one["reached"] for one in ours["answers"]), strict=True))
    inner = [a == b for x, y in pairs for a, b in zip(x[:-1], y[:-1], strict=False)]
    last = [x[-1] == y[-1] for x, y in pairs]
    return {
        "answers_with_as_many_rounds": sum(len(x) == len(y) for x, y in pairs),
        "same_accepted": f"{sum(inner)} of {len(inner)}",
        "same_accepted_in_the_last_round": f"{sum(last)} of {len(last)}",
    }


def counters(llm: LLM) -> dict:
    found = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    by_depth = getattr(found.get("num_accepted_tokens_per_pos"), "values", [])
    values = {name: found[name].value for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")}
    return values | {"accepted_by_depth": [count / values["num_drafts"] for count in by_depth]}


def main(target: str, drafter: str, ours_path: str, out: str, method: str | None = None) -> None:
    ours = json.loads(Path(ours_path).read_text())
    plain_llm = LLM(model=target, **COMMON)
    plain, _ = answer(plain_llm, ours)
    del plain_llm
    try:
        if method is None:
            speculating = LLM(model=drafter, **DETAILED, **COMMON)
        else:
            speculative = {"method": method, "model": drafter, "num_speculative_tokens": DEPTH}
            speculating = LLM(model=target, speculative_config=speculative, **DETAILED, **COMMON)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        Path(out).write_text(json.dumps({"loads": False, "reason": reason}, indent=1) + "\n")
        print(f"not loaded: {reason}")
        return
    drafted, accepted = answer(speculating, ours)
    told = counters(speculating)
    result = {
        "loads": True,
        "answers": len(plain),
        "equal_to_own_plain": sum(a == b for a, b in zip(plain, drafted, strict=True)),
        "equal_to_ours": sum(a == one["answer"] for a, one in zip(drafted, ours["answers"], strict=True)),
        "mean_acceptance_length": 1 + told["num_accepted_tokens"] / told["num_drafts"],
        **told,
        "rounds_compared": same_rounds(accepted, ours),
        "ours": {name: ours[name] for name in ("rounds", "tau", "tau_with_unpublished", "accepted_by_depth")},
    }
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
