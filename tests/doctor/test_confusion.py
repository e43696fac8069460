"""Planted fault against diagnosis: real trainings on the bundled target, about an hour of two quiet cores."""

import json
from pathlib import Path
from typing import Any

import pytest

from eaglelab.assets import bundled_data
from eaglelab.decoding import Engine
from eaglelab.doctor.diagnosis import MARGIN
from eaglelab.evaluation import load_prompts
from eaglelab.evaluation.chats import chat_encoder
from eaglelab.target import FrozenTarget
from tests.doctor.planting import REARRANGED, TRAINED, Drafter, diagnosis_of, load, named, rearrange, train

RESULTS = Path(__file__).parents[2] / "experiments" / "doctor" / "results.json"
STEPS = {"eagle": 400, "hass": 400, "eagle3": 400}
PROMPTS, TOKENS = 32, 64


def answered(target: FrozenTarget) -> list[tuple[list[int], int]]:
    encode = chat_encoder(target)
    prompts = [list(encode(list(one.messages[:1]))) for one in load_prompts(bundled_data("eval"), limit=PROMPTS)]
    results = Engine(target).generate(prompts, max_new_tokens=TOKENS, batch=16)
    return [(prompt + result.tokens, len(prompt)) for prompt, result in zip(prompts, results, strict=True)]


@pytest.fixture(scope="module")
def bundled() -> tuple[FrozenTarget, list[tuple[list[int], int]]]:
    target = FrozenTarget.load("bundled")
    return target, answered(target)


@pytest.mark.slow
@pytest.mark.timeout(10_800)
@pytest.mark.parametrize("variant", STEPS)
def test_nine_of_ten_planted_faults_are_named_and_none_is_invented(variant, bundled, tmp_path):
    """Writes its part of ``experiments/doctor/results.json``: what was planted, what was said, tau as declared and as
    planted.

    A fault whose true wiring gains less tau than the doctor asks for makes no difference to find: it may go unnamed.
    """
    target, conversations = bundled
    table: list[dict[str, Any]] = []

    def note(fault: str, drafter: Drafter) -> None:
        found = diagnosis_of(drafter, conversations)
        true = {one.hypothesis.name: one.tau for one in found.findings}.get(fault, found.declared.tau)
        felt = fault == "other_target" or true - found.declared.tau >= MARGIN
        right = named(found) == fault if felt else named(found) in ("as_declared", fault)
        row = {"variant": variant, "planted": fault, "named": named(found), "tau": round(found.declared.tau, 3)}
        row |= {"tau_as_planted": round(true, 3), "sureness": found.sureness, "right": right, "felt": felt}
        table.append(row)
        print(row, flush=True)

    for fault in ("declared", *TRAINED[variant]):
        train(variant, tmp_path / fault, fault, steps=STEPS[variant])
        note(fault, load(tmp_path / fault, target))
    for fault in REARRANGED.get(variant, ()):
        note(fault, rearrange(load(tmp_path / "declared", target), fault))
    others = [row for row in json.loads(RESULTS.read_text()) if row["variant"] != variant] if RESULTS.exists() else []
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(others + table, indent=1) + "\n")
    assert all(row["right"] for row in table if not row["felt"]), "a fault was invented"
    felt = [row for row in table if row["felt"]]
    assert len(felt) >= 0.5 * len(TRAINED[variant])
    assert sum(row["right"] for row in felt) >= 0.9 * len(felt), [row for row in felt if not row["right"]]
