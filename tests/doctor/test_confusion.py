"""Planted fault against diagnosis: real trainings on the bundled target, about an hour of two quiet cores.

One row alone: ``python -m pytest -m slow tests/doctor/test_confusion.py -k "eagle3 and token_late"``.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eaglelab.assets import bundled_data
from eaglelab.decoding import Engine
from eaglelab.doctor.diagnosis import MARGIN
from eaglelab.evaluation import load_prompts
from eaglelab.evaluation.chats import chat_encoder
from eaglelab.target import FrozenTarget
from tests.doctor.planting import REARRANGED, TRAINED, diagnosis_of, load, named, rearrange, train

RESULTS = Path(__file__).parents[2] / "experiments" / "doctor" / "results.json"
STEPS = {"eagle": 400, "hass": 400, "eagle3": 400}
PROMPTS, TOKENS = 32, 64
CASES = [
    (variant, fault) for variant in STEPS for fault in ("declared", *TRAINED[variant], *REARRANGED.get(variant, ()))
]


def answered(target: FrozenTarget) -> list[tuple[list[int], int]]:
    encode = chat_encoder(target)
    prompts = [list(encode(list(one.messages[:1]))) for one in load_prompts(bundled_data("eval"), limit=PROMPTS)]
    results = Engine(target).generate(prompts, max_new_tokens=TOKENS, batch=16)
    return [(prompt + result.tokens, len(prompt)) for prompt, result in zip(prompts, results, strict=True)]


@pytest.fixture(scope="module")
def bundled() -> tuple[FrozenTarget, list[tuple[list[int], int]]]:
    target = FrozenTarget.load("bundled")
    return target, answered(target)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Callable[[str], Path]:
    """The run folder of a variant that was trained as it declares; once for all that is put into it."""

    @functools.cache
    def trained(variant: str) -> Path:
        folder = tmp_path_factory.mktemp("healthy") / variant
        train(variant, folder, steps=STEPS[variant])
        return folder

    return trained


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("variant", "fault"), CASES)
def test_a_planted_fault_is_examined(variant, fault, bundled, healthy, tmp_path):
    """Writes its row of ``experiments/doctor/results.json``: what was said, tau as declared and as planted.

    A fault whose true wiring gains less tau than the doctor asks for makes no difference to find: it may go unnamed,
    but no other may be named. Faults that are felt are judged together below.
    """
    target, conversations = bundled
    if fault in TRAINED[variant]:
        train(variant, tmp_path / fault, fault, steps=STEPS[variant])
        drafter = load(tmp_path / fault, target)
    else:
        drafter = load(healthy(variant), target)
        drafter = drafter if fault == "declared" else rearrange(drafter, fault)
    found = diagnosis_of(drafter, conversations)
    true = {one.hypothesis.name: one.tau for one in found.findings}.get(fault, found.declared.tau)
    felt = fault == "other_target" or true - found.declared.tau >= MARGIN
    right = named(found) == fault if felt else named(found) in ("as_declared", fault)
    row = {"variant": variant, "planted": fault, "named": named(found), "tau": round(found.declared.tau, 3)}
    row |= {"tau_as_planted": round(true, 3), "sureness": found.sureness, "right": right, "felt": felt}
    print(row, flush=True)
    rows = {(one["variant"], one["planted"]): one for one in recorded()} | {(variant, fault): row}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps([rows[case] for case in CASES if case in rows], indent=1) + "\n")
    assert felt or right, "a fault was invented"


def recorded() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def test_nine_of_ten_planted_faults_are_named_and_none_is_invented():
    """Of the recorded table, which is whole."""
    rows = recorded()
    assert [(row["variant"], row["planted"]) for row in rows] == CASES
    assert all(row["right"] for row in rows if not row["felt"]), "a fault was invented"
    felt = [row for row in rows if row["felt"]]
    assert len(felt) >= 20
    assert sum(row["right"] for row in felt) >= 0.9 * len(felt), [row for row in felt if not row["right"]]
