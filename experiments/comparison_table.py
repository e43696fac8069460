"""python experiments/comparison_table.py STUDY [COMPARISON]

Print the tables of experiments/STUDY/README.md from its results; with the folder of a comparison (`eaglelab compare`)
take its results over first.
"""

import json
import sys
from pathlib import Path

NAMES = ("eagle", "hass", "eagle3")
ASKED = (
    "recipes",
    "train",
    "budget",
    "seeds",
    "suites",
    "limit",
    "turns",
    "max_new_tokens",
    "trees",
    "batches",
    "versions",
)


def take_over(comparison: Path, results: Path) -> None:
    whole = json.loads((comparison / "results.json").read_text())
    asked = json.loads((comparison / "comparison.json").read_text())
    kept = {part: [one for one in whole[part] if one["suite"] != "eval"] for part in ("summary", "contrasts")}
    results.write_text(json.dumps({"asked": {key: asked[key] for key in ASKED}} | kept, indent=1) + "\n")


def measure(one: dict, name: str, unit: str = "") -> str:
    return f"{one[name]:.2f}{unit} ({one[name + '_low']:.2f} to {one[name + '_high']:.2f})"


def show(results: dict) -> None:
    cells = {(one["suite"], one["tree"], one["name"]): one for one in results["summary"]}
    groups = list(dict.fromkeys((suite, tree) for suite, tree, _ in cells))
    for title, name, unit in (("tau", "tau", ""), ("speed-up", "speedup", "x")):
        print(f"| {title} | tree | {' | '.join(NAMES)} |\n|---|---|---|---|---|")
        for suite, tree in groups:
            shown = " | ".join(measure(cells[suite, tree, drafter], name, unit) for drafter in NAMES)
            print(f"| {suite} | {tree} | {shown} |")
        print()
    print("| | hass - eagle | eagle3 - eagle |\n|---|---|---|")
    for quantity in ("tau", "speedup"):
        verdicts = {pair: [] for pair in (("hass", "eagle"), ("eagle3", "eagle"))}
        for one in results["contrasts"]:
            if one["measure"] == quantity and (one["one"], one["other"]) in verdicts:
                verdicts[one["one"], one["other"]].append(one["verdict"])
        told = [
            ", ".join(f"{all_of.count(verdict)} {verdict}" for verdict in dict.fromkeys(all_of))
            for all_of in verdicts.values()
        ]
        print(f"| {quantity}, {len(groups)} pairs | {' | '.join(told)} |")
    same, answers = (sum(one[key] for one in results["summary"]) for key in ("identical", "answers"))
    print(f"\n{same:,} of {answers:,} answers equal plain decoding, id for id.")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    file = Path(__file__).parent / sys.argv[1] / "results" / "results.json"
    if len(sys.argv) == 3:
        take_over(Path(sys.argv[2]), file)
    show(json.loads(file.read_text()))
