"""python experiments/compare_check.py OUT

Recompute a comparison's tau, totals and acceptance by depth from nothing but the records of its rounds, and compare
with its results.json. Independent of the package: pandas alone. Exit code 1 where a number differs.
"""

import json
import sys
from pathlib import Path

import pandas as pd

KEYS = ("name", "seed", "suite", "tree", "temperature", "batch")


def recompute(rounds: pd.DataFrame) -> dict[str, object]:
    accepted, reached = rounds["accepted"], rounds["reached"]
    tree = rounds["depth"].map(lambda depths: max(depths, default=0))  # deepest level that was drafted
    levels = range(1, int(max(tree.max(), reached.max())) + 1)
    open_at = [((tree >= k) & (reached >= k - 1)).sum() for k in levels]
    return {
        "tau": 1 + accepted.sum() / len(rounds),
        "rounds": len(rounds),
        "new_tokens": rounds["published"].sum() + rounds["request"].nunique(),  # the first token comes from the prefill
        "drafted_nodes": rounds["drafted"].sum(),
        "verified_rows": rounds["verified"].sum(),
        "acceptance_cumulative": [(accepted >= k).mean() for k in levels],
        "acceptance_conditional": [
            (reached >= k).sum() / n if n else None for k, n in zip(levels, open_at, strict=True)
        ],
    }


def check(folder: Path) -> int:
    """Number of values that differ."""
    results = json.loads((folder / "results.json").read_text())
    rows = {tuple(row[key] for key in KEYS): row for row in results["rows"]}
    wrong = 0
    for path in sorted(folder.glob("cells/*/rounds.parquet")):
        cell = json.loads(path.with_name("cell.json").read_text())["cell"]
        row = rows.pop(tuple(cell[key] for key in KEYS), None)
        if row is None:
            continue  # of an earlier plan
        for name, value in recompute(pd.read_parquet(path)).items():
            if not equal(value, row[name]):
                wrong += 1
                print(f"{path.parent.name}: {name} is {row[name]} in results.json, {value} from the rounds")
    for key in rows:
        wrong += 1
        print(f"no records of {key}")
    print(f"{len(results['rows'])} cells, {wrong} differences")
    return wrong


def equal(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return one is other or abs(one - other) < 1e-12


if __name__ == "__main__":
    raise SystemExit(check(Path(sys.argv[1])) > 0)
