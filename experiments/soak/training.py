"""python experiments/soak/training.py --minutes 30

Train, kill and resume without end: each training is ended again and again at random moments, by SIGKILL, SIGTERM or
Ctrl-C, and must end with the bits of the same training undisturbed. Writes training.json.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SMALL = ["data.limit=48", "data.val_limit=8", "data.batch_size=2", "trainer.val_check_interval=8"]
SMALL += ["trainer.max_steps=24", "callbacks.last.every_n_steps=3", "logger=none"]
VARIANTS = ("eagle", "hass", "eagle3")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "eaglelab.cli.main", "train", *arguments]


def stamp(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def disturbed(folder: Path, job: list[str], dice: random.Random, deadline: float, seen: Counter) -> list[str]:
    """Start, end and resume a training until it is whole; after the deadline it is left alone.

    Returns:
        what went wrong.
    """
    last, problems = folder / "checkpoints" / "last.ckpt", []
    while True:
        before = stamp(last)
        resume = ["ckpt_path=last"] if before else []
        started = time.monotonic()
        with tempfile.TemporaryFile("w+") as heard:
            process = subprocess.Popen(
                command(*job, f"hydra.run.dir={folder}", *resume), stdout=heard, stderr=heard, env=dict(os.environ)
            )
            hunted = time.monotonic() < deadline and seen["in this training"] < 8
            if hunted and dice.random() < 0.6:  # some time after its first checkpoint
                while stamp(last) == before and process.poll() is None:
                    time.sleep(0.05)
                time.sleep(dice.uniform(0, 3))
            elif hunted:  # while it starts
                time.sleep(dice.uniform(0, 20))
            if hunted and process.poll() is None:
                kind = dice.choice(SIGNALS)
                process.send_signal(kind)
                seen[kind.name] += 1
                seen["in this training"] += 1
            code = process.wait()
            heard.seek(0)
            said = heard.read()
        seen["processes"] += 1
        seen["seconds"] += round(time.monotonic() - started)
        if code == 0:
            seen["in this training"] = 0
            return problems
        if code > 0 and code != 130:
            problems.append(f"{folder.name} ended with {code}: {said[-1500:]}")
            return problems
        seen["resumed" if stamp(last) else "started anew"] += 1


def same_bits(whole: Path, cut: Path) -> bool:
    """Weights and optimizer state of two runs' last checkpoints."""
    one, other = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (whole, cut))
    return _flat(one["state_dict"]) == _flat(other["state_dict"]) and _flat(one["optimizer_states"]) == _flat(
        other["optimizer_states"]
    )


def _flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: _flat(one) for key, one in value.items()}
    return [_flat(one) for one in value] if isinstance(value, list | tuple) else value


def soak(minutes: float, seed: int = 0) -> dict[str, Any]:
    """Trainings for so long; the last one is finished."""
    began, dice, seen = time.monotonic(), random.Random(seed), Counter()
    deadline = began + minutes * 60
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        while time.monotonic() < deadline:
            variant = VARIANTS[seen["trainings"] % len(VARIANTS)]
            job = [*SMALL, f"variant={variant}", f"seed={seen['trainings']}"]
            whole, cut = (Path(place) / f"{variant}-{kind}-{seen['trainings']}" for kind in ("whole", "cut"))
            subprocess.run(command(*job, f"hydra.run.dir={whole}"), check=True, capture_output=True)
            problems += disturbed(cut, job, dice, deadline, seen)
            if not problems and not same_bits(whole, cut):
                problems.append(f"{cut.name}: other bits than undisturbed")
            left = sorted(path.name for path in cut.rglob("*") if path.suffix in (".tmp", ".part"))
            seen["files left behind"] += len(left)
            seen["trainings"] += 1
            shutil.rmtree(whole)
            shutil.rmtree(cut)
            print(f"{(time.monotonic() - began) / 60:5.1f} min  {dict(seen)}  {problems}", flush=True)
            if problems:
                break
    del seen["in this training"]
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seen": dict(sorted(seen.items())),
        "problems": problems,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "training.json")
    arguments = parser.parse_args()
    figures = soak(arguments.minutes, arguments.seed)
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    raise SystemExit(bool(figures["problems"]))
