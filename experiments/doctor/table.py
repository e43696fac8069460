"""python experiments/doctor/table.py

Print the tables of README.md from results.json, which tests/doctor/test_confusion.py writes.
"""

import json
from collections import Counter
from pathlib import Path

HEALTHY = ("declared", "as_declared")


def main() -> None:
    rows = json.loads((Path(__file__).parent / "results.json").read_text())
    print("| variant | planted | tau as declared | tau as planted | the doctor says | sure | |\n" + "|---" * 7 + "|")
    for row in rows:
        planted, told = ("none" if row[which] in HEALTHY else row[which] for which in ("planted", "named"))
        verdict = "right" if row["right"] else "**wrong**"
        verdict += "" if row["felt"] or planted == "none" else ", too small to matter"
        print(
            f"| {row['variant']} | {planted} | {row['tau']:.2f} | {row['tau_as_planted']:.2f} | {told} | "
            f"{row['sureness']:.0%} | {verdict} |"
        )
    print("\n| variant | healthy, nothing invented | faults that cost tau, named | small faults, named or left |")
    print("|---|---|---|---|")
    for variant in dict.fromkeys(row["variant"] for row in rows):
        right, of = Counter(), Counter()
        for row in (one for one in rows if one["variant"] == variant):
            kind = "healthy" if row["planted"] in HEALTHY else "felt" if row["felt"] else "small"
            of[kind] += 1
            right[kind] += row["right"]
        counts = [f"{right[one]} of {of[one]}" for one in ("healthy", "felt", "small")]
        print(f"| {variant} | {' | '.join(counts)} |")


if __name__ == "__main__":
    main()
