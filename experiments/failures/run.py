"""python experiments/failures/run.py [wiring | decoding | sampling | training ...] [--runs DIR]

Measure what the seeded faults of tests/mutants do to acceptance and loss on the bundled target, and write results.json,
the tables of README.md and docs/figures/failures.svg. What has a result is skipped; `--report` only prints and draws.

--runs DIR holds one trained run folder of each variant, `eagle`, `hass` and `eagle3` or with `-0` behind it (those of
experiments/three_variants, or `python train.py variant=... hydra.run.dir=DIR/...`). Linux: every fault is put into a
forked process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from eaglelab.assets import bundled_data  # noqa: E402
from eaglelab.cli.compose import compose_training  # noqa: E402
from eaglelab.cli.quiet import quiet_libraries  # noqa: E402
from eaglelab.decoding import Engine, Sampling, make_tree  # noqa: E402
from eaglelab.doctor import diagnose, examine, hypotheses_for  # noqa: E402
from eaglelab.evaluation import load_prompts  # noqa: E402
from eaglelab.evaluation.chats import chat_encoder  # noqa: E402
from eaglelab.target import FrozenTarget  # noqa: E402
from eaglelab.training import RunFolder, train  # noqa: E402
from tests.mutants import MUTANTS  # noqa: E402

RESULTS = HERE / "results.json"
FIGURE = ROOT / "docs" / "figures" / "failures.svg"
PROMPTS, TOKENS = 16, 64
STEPS = {"eagle": 80, "hass": 60, "eagle3": 40}
"""Optimizer steps that a trained drafter is trained on, of one packed row of 512 tokens each."""
TREES = {
    "chain": make_tree("chain", depth=5),
    "static": make_tree("static"),
    "dynamic": make_tree("dynamic", width=4, depth=6, budget=16),
    "sampled": make_tree("sampled", widths=[3, 2, 1]),
    "chain of 1": make_tree("chain", depth=1),
}
DECODING = {
    "frontier_published": ("hass", "static"),
    "tree_position_off": ("hass", "static"),
    "tree_position_by_row": ("hass", "dynamic"),
    "tree_siblings_visible": ("hass", "dynamic"),
    "rows_by_token": ("hass", "dynamic"),
    "features_of_leading_rows": ("hass", "dynamic"),
    "rejected_draft_rows_kept": ("hass", "dynamic"),
    "draft_position_stays": ("hass", "chain"),
    "rows_mixed_up": ("hass", "dynamic"),
    "draft_rows_mixed_up": ("hass", "dynamic"),
    "padding_row_answers": ("hass", "dynamic"),
    "end_token_inside": ("hass", "dynamic"),
    "unpublished_counted": ("hass", "dynamic"),
    "deeper_first": ("hass", "dynamic"),
}
"""Mutant: whose drafter, which tree."""
SAMPLING = {"bonus_unprocessed": "chain of 1", "q_keeps_the_rejected": "sampled"}
TRAINING = {
    "feature_shift": "eagle",
    "token_shift": "eagle",
    "target_shift": "eagle",
    "supervision_shift": "eagle",
    "future_visible": "eagle",
    "feature_before_the_norm": "eagle",
    "noisy_teacher": "eagle",
    "regression_summed_over_the_width": "eagle",
    "segments_visible": "eagle",
    "position_stays": "hass",
    "ancestors_forgotten": "hass",
    "renormalised_top_k": "hass",
    "post_norm_recurrence": "eagle3",
    "detached_steps": "eagle3",
    "position_stays_eagle3": "eagle3",
    "sibling_visible": "eagle3",
}
SETTINGS = {"supervision_shift": ["variant.supervise=source"]}
"""Faults that are somebody's setting."""


def isolated(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``work`` in a forked process, which may change the package as it likes."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send(("result", work(*arguments)))
        except Exception as error:  # a fault may also end in an exception: that is an effect too
            theirs.send(("error", f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    kind, value = ours.recv()
    process.join()
    return value if kind == "result" else {"error": value}


class Bench:
    """Target, drafters and questions; loaded once."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.target = FrozenTarget.load("bundled")
        encode = chat_encoder(self.target)
        questions = load_prompts(bundled_data("eval"), limit=PROMPTS)
        self.prompts = [list(encode(list(one.messages[:1]))) for one in questions]
        self.plain = Engine(self.target).generate(self.prompts, max_new_tokens=TOKENS, batch=4)
        self.answers = [(p + one.tokens, len(p)) for p, one in zip(self.prompts, self.plain, strict=True)]

    def folder(self, variant: str) -> RunFolder:
        names = [name for name in (variant, f"{variant}-0") if (self.runs / name).is_dir()]
        if not names:
            sys.exit(f"no run folder {variant} or {variant}-0 in {self.runs}; train one, or give --runs")
        return RunFolder.existing(self.runs / names[0])

    def examined(self, folder: RunFolder) -> dict[str, Any]:
        """Chains of 5 along the target's own greedy answers, as the right code reads the drafter, and the doctor."""
        network, taps = folder.load_network().eval(), folder.manifest().taps
        found = diagnose(examine(network, self.target, hypotheses_for(network, self.target, taps), self.answers))
        return {
            "tau": round(found.declared.tau, 3),
            "one_step": round(found.declared.one_step, 4),
            "doctor": found.verdict,
            "doctor_names": found.best.hypothesis.name,
            "doctor_tau": round(found.best.tau, 3),
            "sureness": round(found.sureness, 3),
        }


# ---- the four parts: each yields (key, function that measures) -----------------------------------------------------


def wiring(bench: Bench, variant: str) -> dict[str, Any]:
    """A healthy drafter read under every wiring that the doctor knows: what each mistake of a server costs."""
    folder = bench.folder(variant)
    network = folder.load_network().eval()
    hypotheses = hypotheses_for(network, bench.target, folder.manifest().taps)
    found = examine(network, bench.target, hypotheses, bench.answers)
    diagnosis = diagnose(found)
    return {
        "doctor": diagnosis.verdict,
        "tau": {one.hypothesis.name: round(one.tau, 3) for one in diagnosis.findings},
        "one_step": {one.hypothesis.name: round(one.one_step, 4) for one in diagnosis.findings},
        "read_with": {one.name: one.trained for one in hypotheses},
    }


def decoding(bench: Bench, variant: str, tree: str, fault: str | None) -> dict[str, Any]:
    """Greedy decoding with a trained drafter: acceptance, and how much of the text is still the target's."""
    if fault:
        MUTANTS[fault].apply()
    drafter = bench.folder(variant).load_drafter(bench.target)
    room = bench.target.max_positions  # a fault may fill the slots with rows that nobody counts
    engine = Engine(bench.target, drafter, TREES[tree], capacity=room)
    results = engine.generate(bench.prompts, max_new_tokens=TOKENS, batch=4)
    accepted = [count for one in results for count in one.accepted]
    same = sum(one.tokens == other.tokens for one, other in zip(results, bench.plain, strict=True))
    return {
        "variant": variant,
        "tree": tree,
        "tau": round(1 + float(np.mean(accepted)), 3),
        "tokens_per_round": round(sum(len(one.tokens) - 1 for one in results) / max(len(accepted), 1), 3),
        "identical": same,
        "of": len(results),
        "new_tokens": sum(len(one.tokens) for one in results),
    }


def sampling(bench: Bench, tree: str, fault: str | None) -> dict[str, Any]:
    """2,000 draws of three tokens at T = 1.5 among the 3 most probable: distance to the exact joint distribution."""
    rule, draws, length = Sampling(temperature=1.5, top_k=3, seed=1), 2000, 3
    prompt = bench.prompts[1]

    def following(tokens: tuple[int, ...]) -> dict[int, float]:
        with torch.no_grad():
            logits = bench.target.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float() / rule.temperature
        best = logits.topk(rule.top_k)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    exact = {(): 1.0}
    for _ in range(length):
        exact = {(*told, x): p * px for told, p in exact.items() for x, px in following(told).items()}
    if fault:
        MUTANTS[fault].apply()
    engine = Engine(bench.target, bench.folder("hass").load_drafter(bench.target), TREES[tree])
    results = engine.generate([prompt] * draws, max_new_tokens=length, stop_ids=set(), sampling=rule, batch=200)
    seen = Counter(tuple(one.tokens) for one in results)
    outcomes = sorted(set(exact) | set(seen))
    p = np.array([exact.get(one, 0.0) for one in outcomes])
    honest = np.random.default_rng(0).multinomial(draws, p / p.sum(), size=4000) / draws
    distance = 0.5 * float(np.abs(np.array([seen[one] for one in outcomes]) / draws - p).sum())
    return {
        "tree": tree,
        "distance": round(distance, 4),
        "honest_99": round(float(np.quantile(0.5 * np.abs(honest - p).sum(-1), 0.99)), 4),
        "impossible": sum(count for one, count in seen.items() if one not in exact),
    }


def trained(bench: Bench, variant: str, fault: str | None, scratch: Path) -> dict[str, Any]:
    """The trained drafter, trained on for a while with the fault; then read by the right code, and by the doctor."""
    steps, out = STEPS[variant], scratch / (fault or f"right-{variant}")

    def work() -> dict[str, float]:
        if fault and fault not in SETTINGS:
            MUTANTS[fault].apply()
        job = [
            *SETTINGS.get(fault or "", ()),
            f"variant={variant}",
            "recipe=none",
            "optim.lr=6e-3",
            "data.batch_size=1",
            "data.val_limit=12",
        ]
        job += [f"data.limit={4 * steps}", f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}"]
        job += [
            "callbacks.progress=null",
            "+trainer.enable_progress_bar=false",
            "logger=csv",
            "trainer.log_every_n_steps=1",
        ]
        job.append(f"init_from={bench.folder(variant).path.resolve()}")
        train(compose_training(job, out), out)
        return curve(out)

    seen = isolated(work)
    if "error" in seen:
        return {"variant": variant, "steps": steps, **seen}
    return {"variant": variant, "steps": steps, **seen, **isolated(lambda: bench.examined(RunFolder.existing(out)))}


def curve(out: Path) -> dict[str, float]:
    """What the training itself reported: its loss over the last tenth of its steps, and its validation."""
    import csv

    (log,) = out.glob("**/metrics.csv")
    with log.open() as file:
        rows = list(csv.DictReader(file))
    loss = [float(row["train/loss"]) for row in rows if row.get("train/loss")]
    accuracy = [float(row["train/accuracy"]) for row in rows if row.get("train/accuracy")]
    tau = [float(row["val/tau"]) for row in rows if row.get("val/tau")]
    last = max(len(loss) // 10, 1)
    return {
        "reported_loss": round(float(np.mean(loss[-last:])), 3),
        "reported_accuracy": round(float(np.mean(accuracy[-last:])), 4),
        "reported_tau": round(tau[-1], 3),
    }


def jobs(bench: Callable[[], Bench], parts: list[str], scratch: Path) -> dict[str, dict[str, Callable[[], Any]]]:
    """Part -> key -> what measures it. The right code has the key ``right/...``."""
    found: dict[str, dict[str, Callable[[], Any]]] = {part: {} for part in parts}
    if "wiring" in parts:
        for variant in ("eagle", "eagle3"):
            found["wiring"][variant] = lambda variant=variant: wiring(bench(), variant)
    if "decoding" in parts:
        for variant, tree in dict.fromkeys(DECODING.values()):
            found["decoding"][f"right/{variant}/{tree}"] = lambda v=variant, t=tree: isolated(
                decoding, bench(), v, t, None
            )
        for fault, (variant, tree) in DECODING.items():
            found["decoding"][fault] = lambda v=variant, t=tree, f=fault: isolated(decoding, bench(), v, t, f)
    if "sampling" in parts:
        for tree in dict.fromkeys(SAMPLING.values()):
            found["sampling"][f"right/{tree}"] = lambda t=tree: isolated(sampling, bench(), t, None)
        for fault, tree in SAMPLING.items():
            found["sampling"][fault] = lambda t=tree, f=fault: isolated(sampling, bench(), t, f)
    if "training" in parts:
        for variant in dict.fromkeys(TRAINING.values()):
            found["training"][f"right/{variant}"] = lambda v=variant: trained(bench(), v, None, scratch)
            for fault in [name for name, whose in TRAINING.items() if whose == variant]:
                found["training"][fault] = lambda v=variant, f=fault: trained(bench(), v, f, scratch)
    return found


# ---- the report --------------------------------------------------------------------------------------------------


def kept(results: dict[str, Any]) -> dict[str, list[tuple[str, float]]]:
    """Panel -> (fault, share of the accepted draft tokens that are left), the worst first."""
    panels: dict[str, list[tuple[str, float]]] = {}
    for part, title in (("training", "trained with the fault"), ("decoding", "decoded with it")):
        cells = results.get(part, {})
        for name, one in cells.items():
            if not name.startswith("right/") and "error" not in one:
                right = cells[f"right/{one['variant']}" + (f"/{one['tree']}" if part == "decoding" else "")]
                share = (one["tau"] - 1) / (right["tau"] - 1)
                panels.setdefault(title, []).append((f"{MUTANTS[name].trap} ({one['variant']})", share))
    for variant, one in results.get("wiring", {}).items():
        for name, tau in one["tau"].items():
            if name != "declared":
                share = (tau - 1) / (one["tau"]["declared"] - 1)
                panels.setdefault("read with it", []).append((f"{name} ({variant})", share))
    return {title: sorted(panel, key=lambda fault: fault[1]) for title, panel in panels.items()}


def draw(results: dict[str, Any]) -> None:
    plt.rcParams.update(
        {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "failures", "figure.constrained_layout.use": True}
    )
    panels = kept(results)
    heights = [len(panel) for panel in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 0.17 * sum(heights) + 1), height_ratios=heights, sharex=True
    )
    for axis, (title, panel) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        y = np.arange(len(panel))
        axis.barh(y, [share for _, share in panel], color="C0", height=0.7)
        axis.set(yticks=y, yticklabels=[name for name, _ in panel], ylim=(len(panel) - 0.5, -0.5))
        axis.set_title(title, loc="left", fontweight="bold", fontsize=9)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.xaxis.set_major_formatter("{x:.0%}")
        axis.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(axes)[-1].set_xlabel("accepted draft tokens that are left, (tau - 1) / (tau of the right code - 1)")
    figure.savefig(FIGURE, metadata={"Date": None})
    plt.close(figure)


def show(results: dict[str, Any]) -> None:
    for variant, one in results.get("wiring", {}).items():
        print(f"\n| {variant}: read with | tau | one step |\n|---|---|---|")
        for name, tau in one["tau"].items():
            print(f"| {one['read_with'][name]} | {tau:.2f} | {one['one_step'][name]:.1%} |")
    if cells := results.get("decoding"):
        print("\n| fault | drafter, tree | tau right | tau | tokens per round | answers equal |")
        print("|---|---|---|---|---|---|")
        for name, one in cells.items():
            if name.startswith("right/"):
                continue
            if "error" in one:
                print(f"| {MUTANTS[name].trap} | | | {one['error']} | | |")
                continue
            right = cells[f"right/{one['variant']}/{one['tree']}"]
            print(
                f"| {MUTANTS[name].trap} | {one['variant']}, {one['tree']} | {right['tau']:.2f} | {one['tau']:.2f} "
                f"| {one['tokens_per_round']:.2f} | {one['identical']} of {one['of']} |"
            )
    if cells := results.get("sampling"):
        print("\n| sampling | tree | distance | 99 % of honest samples below |\n|---|---|---|---|")
        for name, one in cells.items():
            title = "right" if name.startswith("right/") else MUTANTS[name].trap
            print(f"| {title} | {one['tree']} | {one['distance']:.3f} | {one['honest_99']:.3f} |")
    if cells := results.get("training"):
        print(
            "\n| trained with | variant | steps | loss it reports | its own accuracy | its own tau | tau in decoding |"
        )
        print("|---|---|---|---|---|---|---|")
        for name, one in sorted(cells.items(), key=lambda cell: (cell[1]["variant"], not cell[0].startswith("right/"))):
            title = "right" if name.startswith("right/") else MUTANTS[name].trap
            if "error" in one:
                print(f"| {title} | {one['variant']} | {one['error']} | | | | |")
                continue
            doctor = one["doctor_names"] if one["doctor"] == "other_wiring" else one["doctor"].replace("_", " ")
            print(
                f"| {title} | {one['variant']} | {one['reported_loss']:.3f} | {one['reported_accuracy']:.1%} "
                f"| {one['reported_tau']:.2f} | {one['tau']:.2f} | {doctor} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["wiring", "decoding", "sampling", "training"]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; none: all")
    parser.add_argument("--runs", type=Path, default=Path("outputs/three_variants"))
    parser.add_argument("--only", nargs="+", metavar="KEY", help="these faults and nothing else")
    parser.add_argument("--report", action="store_true", help="only print and draw")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(parts):
        parser.error(f"no part {', '.join(unknown)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    quiet_libraries()
    loaded: list[Bench] = []

    def bench() -> Bench:
        loaded[:] = loaded or [Bench(asked.runs)]
        return loaded[0]

    with tempfile.TemporaryDirectory() as scratch:
        for part, cells in jobs(bench, [] if asked.report else asked.parts or parts, Path(scratch)).items():
            for key, measure in cells.items():
                if key in results.get(part, {}) or (asked.only and key not in asked.only):
                    continue
                print(f"{part}: {key}", flush=True)
                results.setdefault(part, {})[key] = measure()
                settings = {"prompts": PROMPTS, "tokens": TOKENS, "steps": STEPS, "torch": torch.__version__}
                RESULTS.write_text(json.dumps({**results, "settings": settings}, indent=1) + "\n")
    show(results)
    draw(results)


if __name__ == "__main__":
    main()
