"""Recorded numbers of the pinned public implementations (tests/golden/README.md)."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from eaglelab.data.rows import compile_rows
from eaglelab.drafters import DrafterConfig

FOLDER = Path(__file__).parents[1] / "golden"


class Golden:
    def __init__(self, name: str) -> None:
        self.tensors = load_file(FOLDER / f"{name}.safetensors")
        self.facts = json.loads((FOLDER / f"{name}.json").read_text())

    def group(self, prefix: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def drafter_config(self, **overrides) -> DrafterConfig:
        f = self.facts
        return DrafterConfig(
            hidden_size=f["hidden_size"],
            vocab_size=f["vocab_size"],
            num_attention_heads=f["num_attention_heads"],
            num_key_value_heads=f["num_key_value_heads"],
            head_dim=f["hidden_size"] // f["num_attention_heads"],
            intermediate_size=f["intermediate_size"],
            rms_norm_eps=f["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": f["rope_theta"]},
            max_position_embeddings=64,
            **overrides,
        )

    def rows(self):
        """The case's rows: right-padded single segments, supervised by the source-row flag."""
        valid = self["in.attention_mask"].bool()
        B, S = valid.shape
        return compile_rows(
            valid,
            torch.zeros(B, S, dtype=torch.long),
            torch.arange(S).expand(B, S),
            self["in.loss_mask"].bool(),
            supervise="source",
        )
