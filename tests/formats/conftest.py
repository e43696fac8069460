"""A small target on disk, run folders of untrained drafters, and published layouts written by hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eaglelab.target import FrozenTarget
from eaglelab.training.run_folder import RunFolder
from eaglelab.variants import VARIANTS, OptimConfig
from tests.oracles.golden import Golden

V, D = 97, 32


def save_llama(folder: Path, *, seed: int = 0, embedding=None, head=None, **overrides) -> Path:
    torch.manual_seed(seed)
    shape = {
        "hidden_size": D,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": V,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape | overrides))
    with torch.no_grad():
        if embedding is not None:
            model.get_input_embeddings().weight.copy_(embedding)
        if head is not None:
            model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> FrozenTarget:
    return FrozenTarget.load(save_llama(tmp_path_factory.mktemp("target")))


def make_run(folder: Path, target: FrozenTarget, variant: str, *, zero_bias: bool = False, **settings) -> RunFolder:
    """A run folder as training leaves it, with random weights."""
    torch.manual_seed(1)
    counts = torch.arange(target.vocab_size).remainder(7)  # a draft vocabulary with gaps
    module = VARIANTS[variant](target, OptimConfig(lr=1e-3), answer_counts=lambda: counts, **settings)
    with torch.no_grad():
        for name, parameter in module.network.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
        if zero_bias:
            module.network.fc.bias.zero_()
    run = RunFolder(folder)
    run.checkpoints.mkdir(parents=True)
    module.manifest().save(run.manifest_path)
    checkpoint: dict = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, run.checkpoints / "last.ckpt")
    return run


def llama_keys(facts: dict, **overrides) -> dict:
    """config.json as SafeAILab's drafters have it: old key names, no head_dim."""
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": facts["hidden_size"],
        "intermediate_size": facts["intermediate_size"],
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": facts["num_attention_heads"],
        "num_key_value_heads": facts["num_key_value_heads"],
        "num_hidden_layers": 1,
        "rms_norm_eps": facts["rms_norm_eps"],
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": facts["vocab_size"],
    }
    return {key: value for key, value in (keys | overrides).items() if value is not None}


class Published:
    """A golden case as the folder that its authors would publish."""

    def __init__(self, case: str) -> None:
        self.golden = Golden(case)
        self.fused = case.startswith("eagle3")
        self.tensors = self.golden.group("w.")
        own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": self.golden.facts["draft_vocab_size"]}
        self.config = llama_keys(self.golden.facts, **(own if self.fused else {}))

    def write(self, folder: Path, store: str = "safetensors") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: value.contiguous() for name, value in self.tensors.items()}
        if store == "bin":
            torch.save(tensors, folder / "pytorch_model.bin")
        elif store == "safetensors":
            save_file(tensors, folder / "model.safetensors")
        else:
            places = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
            for shard in set(places.values()):
                save_file({name: tensors[name] for name in tensors if places[name] == shard}, folder / shard)
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder

    def load_target(self, folder: Path) -> FrozenTarget:
        """A target with the case's embedding and head; its layers are random."""
        head = None if self.fused else self.golden["head.weight"]
        return FrozenTarget.load(save_llama(folder, embedding=self.golden["w.embed_tokens.weight"], head=head))


@pytest.fixture(scope="session")
def eagle_target(tmp_path_factory) -> FrozenTarget:
    return Published("eagle2_draft_d3k4t16_s0").load_target(tmp_path_factory.mktemp("eagle_target"))


@pytest.fixture(scope="session")
def eagle3_target(tmp_path_factory) -> FrozenTarget:
    return Published("eagle3_draft_d3k4t16_s0").load_target(tmp_path_factory.mktemp("eagle3_target"))
