"""python experiments/trees/confidence.py RUN

Decode prompts with a dynamic tree, greedily and at temperature 1, and write confidence.json: the drafter's confidence
against what the target accepted, over all nodes and level by level, each with its reliability table.
"""

import argparse
import json
from pathlib import Path

from eaglelab.assets import bundled_data
from eaglelab.decoding import DynamicTree, Sampling
from eaglelab.evaluation import Settings, evaluate, load_prompts, summarize_rounds
from eaglelab.training import RunFolder

TREE = DynamicTree(width=4, depth=6, budget=16)


def measure(folder: RunFolder, temperature: float, prompts: int, max_new_tokens: int) -> dict:
    target = folder.load_target()
    settings = Settings(max_new_tokens=max_new_tokens, sampling=Sampling(temperature=temperature), batch=8)
    questions = load_prompts(bundled_data("eval"), limit=prompts)
    records: list[dict] = []
    result = evaluate(target, folder.load_drafter(target), TREE, questions, settings, on_record=records.append)
    summary = summarize_rounds(records)
    asked = {"temperature": temperature, "prompts": prompts, "max_new_tokens": max_new_tokens, "tree": TREE.settings()}
    kept = {name: summary[name] for name in ("rounds", "tau", "by_depth", "calibration")}
    return {"variant": folder.manifest().variant, **asked, "identical": result.to_dict()["identical"], **kept}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    run = RunFolder.existing(arguments.run)
    results = [measure(run, T, arguments.prompts, arguments.max_new_tokens) for T in (0.0, 1.0)]
    Path(__file__).with_name("confidence.json").write_text(json.dumps(results, indent=1) + "\n")
