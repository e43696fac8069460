"""Planted fault against diagnosis: real trainings on the bundled target, about half an hour on two quiet cores."""

import json
from pathlib import Path

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


def answered(target: FrozenTarget) -> list[tuple[list[int], int]]:
    encode = chat_encoder(target)
    prompts = [list(encode(list(one.messages[:1]))) for one in load_prompts(bundled_data("eval"), limit=PROMPTS)]
    results = Engine(target).generate(prompts, max_new_tokens=TOKENS, batch=16)
    return [(prompt + result.tokens, len(prompt)) for prompt, result in zip(prompts, results, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(10_800)
def test_nine_of_ten_planted_faults_are_named_and_none_is_invented(tmp_path):
    """Writes ``experiments/doctor/results.json``: what was planted, what was said, tau as declared and as planted.

    A fault whose true wiring gains less tau than the doctor asks for makes no difference to find: it may go unnamed.
    """
    target = FrozenTarget.load("bundled")
    conversations = answered(target)
    table = []

    def note(variant: str, fault: str, drafter) -> None:
        found = diagnosis_of(drafter, conversations)
        true = {one.hypothesis.name: one.tau for one in found.findings}.get(fault, found.declared.tau)
        row = {"variant": variant, "planted": fault, "named": named(found), "tau": round(found.declared.tau, 3)}
        row |= {"tau_as_planted": round(true, 3), "sureness": found.sureness}
        table.append(row | {"rivals": [one.hypothesis.name for one in found.rivals]})
        print(row, flush=True)

    for variant, steps in STEPS.items():
        for fault in ("declared", *TRAINED[variant]):
            train(variant, tmp_path / f"{variant}-{fault}", fault, steps=steps)
            note(variant, fault, load(tmp_path / f"{variant}-{fault}", target))
        for fault in REARRANGED.get(variant, ()):
            note(variant, fault, rearrange(load(tmp_path / f"{variant}-declared", target), fault))
    for row in table:
        felt = row["planted"] == "other_target" or row["tau_as_planted"] - row["tau"] >= MARGIN
        row["right"] = row["named"] == row["planted"] if felt else row["named"] in ("as_declared", row["planted"])
        row["felt"] = felt
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(table, indent=1) + "\n")
    assert all(row["right"] for row in table if not row["felt"]), "a fault was invented"
    felt = [row for row in table if row["felt"]]
    assert len(felt) >= 20
    assert sum(row["right"] for row in felt) >= 0.9 * len(felt), [row for row in felt if not row["right"]]
