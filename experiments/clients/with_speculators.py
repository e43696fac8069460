"""speculators loads an EAGLE-3 drafter of ours strictly; the logits of three rollout steps against ours.py.

    VENV/bin/python experiments/clients/with_speculators.py DRAFTER OURS.safetensors OUT.json

Runs in speculators' own environment (see README.md); knows nothing of eaglelab. Its own from_pretrained accepts wrong
names in silence, so the state is loaded by hand here and every name is accounted for.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from speculators.models.eagle3 import Eagle3DraftModel

STEPS = 3
FROM_THE_TARGET = {"verifier_norm.weight", "verifier_lm_head.weight"}


@torch.no_grad()
def main(drafter: str, ours_path: str, out: str) -> None:
    config = SpeculatorModelConfig.from_pretrained(drafter)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config).eval()
    loaded = model.load_state_dict(load_file(f"{drafter}/model.safetensors"), strict=False)
    assert not loaded.unexpected_keys, loaded.unexpected_keys
    assert set(loaded.missing_keys) == FROM_THE_TARGET, loaded.missing_keys

    ours = load_file(ours_path)
    S = ours["taps"].shape[1]
    steps = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: steps.append(logits.float()))
    model(
        hidden_states=ours["taps"],
        input_ids=ours["tokens"][:, 1 : S + 1],
        document_ids=torch.zeros(1, S, dtype=torch.long),
        position_ids=torch.arange(1, S + 1)[None],
        ttt_steps=STEPS,
    )
    result = {"rows": S, "draft_vocabulary": ours["logits"].shape[-1], "largest_difference": [], "same_argmax": []}
    for step, (theirs, expected) in enumerate(zip(steps, ours["logits"], strict=True)):
        known = S - step  # speculators has no token behind its last row, and feeds zeros there
        theirs, expected = theirs[0, :known], expected[:known]
        result["largest_difference"].append(float((theirs - expected).abs().max()))
        result["same_argmax"].append(float((theirs.argmax(-1) == expected.argmax(-1)).float().mean()))
    result["largest_logit"] = float(ours["logits"].abs().max())
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
