"""python experiments/trees/run.py RUN [RUN ...]

Decode the same prompts with every tree, at batch 1 and 8, each alternated with plain decoding of the same engine, and
write results.json and the table of README.md.
"""

import argparse
import json
from pathlib import Path

from eaglelab.assets import bundled_data
from eaglelab.decoding import Chain, DynamicTree, StaticTree
from eaglelab.evaluation import Settings, evaluate, load_prompts
from eaglelab.training import RunFolder

TREES = {
    "chain of 5": Chain(5),
    "static, 25 nodes": StaticTree(),
    "dynamic 4/6/16": DynamicTree(width=4, depth=6, budget=16),
    "dynamic 10/6/59": DynamicTree(width=10, depth=6, budget=59),
}


def measure(folder: RunFolder, prompts: int, max_new_tokens: int) -> list[dict]:
    target = folder.load_target()
    drafter = folder.load_drafter(target)
    variant = folder.manifest().variant
    questions = load_prompts(bundled_data("eval"), limit=prompts)
    rows = []
    for batch in (1, 8):
        for name, tree in TREES.items():
            settings = Settings(max_new_tokens=max_new_tokens, batch=batch)
            figures = evaluate(target, drafter, tree, questions, settings).to_dict()
            spread = figures["speedup_spread"]
            rows.append(
                {
                    "variant": variant,
                    "batch": batch,
                    "tree": name,
                    "tau": figures["tau"],
                    "tau_interval": figures["tau_interval"],
                    "tokens_per_s": figures["tokens_per_s"],
                    "speedup": figures["speedup"],
                    "quartiles": [spread["quartile_1"], spread["quartile_3"]],
                    "split": figures["time_split"],
                    "identical": figures["identical"],
                    "threads": figures["settings"]["threads"],
                }
            )
    return rows


def show(rows: list[dict]) -> None:
    print("| variant | batch | tree | tau | speed-up | quartiles | speed-up / tau | draft / verify |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        low, high = row["quartiles"]
        print(
            f"| {row['variant']} | {row['batch']} | {row['tree']} | {row['tau']:.2f} | {row['speedup']:.2f}x "
            f"| {low:.2f} to {high:.2f} | {row['speedup'] / row['tau']:.0%} "
            f"| {row['split']['draft']:.0%} / {row['split']['verify']:.0%} |"
        )
    same = [row["identical"] for row in rows]
    print(f"\n{sum(s['count'] for s in same)} of {sum(s['of'] for s in same)} answers equal plain decoding, id for id.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    results = []
    for run in arguments.runs:
        results += measure(RunFolder.existing(run), arguments.prompts, arguments.max_new_tokens)
    Path(__file__).with_name("results.json").write_text(json.dumps(results, indent=1) + "\n")
    show(results)
