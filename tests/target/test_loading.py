"""Folders, shards, tied heads, GGUF and hub ids; and one clear line for everything else."""

from __future__ import annotations

import json
import logging
import socket
import time
from pathlib import Path

import gguf
import pytest
import torch
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from eaglelab.target import FrozenTarget
from tests.target.target_families import VOCAB, build
from tests.target.target_tokenizer import tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits_of(target: FrozenTarget) -> torch.Tensor:
    ids_BS = torch.arange(1, 9)[None]
    return target.lm_head(target.features(ids_BS, ("final",))["final"])


def test_a_folder(folder: Path) -> None:
    target = FrozenTarget.load(folder)
    assert torch.equal(logits_of(target), logits_of(FrozenTarget(build("llama"))))
    assert target.tokenizer is not None
    assert target.source == str(folder)
    assert FrozenTarget.load(str(folder), dtype="bf16").dtype == torch.bfloat16
    assert FrozenTarget.load(folder, dtype=torch.float16).dtype == torch.float16
    assert FrozenTarget.load(folder, attn_implementation="eager").text_config._attn_implementation == "eager"


def test_shards_tied_heads_and_a_missing_tokenizer(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    target = FrozenTarget.load(tmp_path)
    assert target.tokenizer is None
    assert target.head_weight is target.model.get_input_embeddings().weight
    assert torch.equal(logits_of(target), logits_of(FrozenTarget(build("qwen2"))))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_families_without_sdpa_fall_back_to_eager(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    assert FrozenTarget.load(tmp_path).text_config._attn_implementation == "eager"


def write_gguf(path: Path) -> None:
    """The tiny Llama as llama.cpp would store it: rotary halves interleaved, tensors renamed."""
    model, tokenizer = build("llama"), tiny_tokenizer()
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    vocabulary += [f"<unused{i}>" for i in range(config.vocab_size - len(vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * len(vocabulary))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    renamed = {
        "model.embed_tokens.": "token_embd.",
        "model.norm.": "output_norm.",
        "lm_head.": "output.",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in state.items():
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if part in name:
                rows, columns = tensor.shape
                halves = tensor.reshape(heads, 2, rows // heads // 2, columns)
                tensor = halves.transpose(1, 2).reshape(rows, columns)
        for old, new in renamed.items():
            name = name.replace(old, new)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_loads_computes_and_saves(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    target = FrozenTarget.load(file)
    wanted = logits_of(FrozenTarget(build("llama")))
    assert torch.allclose(logits_of(target), wanted, atol=1e-5)
    by_name = FrozenTarget.load(tmp_path, gguf_file="tiny.gguf")
    assert by_name.fingerprint.same_target(target.fingerprint)
    target.model.save_pretrained(tmp_path / "saved")
    assert torch.allclose(logits_of(FrozenTarget.load(tmp_path / "saved")), wanted, atol=1e-5)
    with pytest.raises(ValueError, match=r"Did you mean the file .*tiny\.gguf"):
        FrozenTarget.load(tmp_path)
    with pytest.raises(ValueError, match=r"no file other\.gguf"):
        FrozenTarget.load(tmp_path, gguf_file="other.gguf")


@pytest.mark.parametrize("source", ["/nope/model", "./nope", "~/nope", "a/b/c"])
def test_a_missing_path_is_one_line(source: str) -> None:
    with pytest.raises(ValueError, match=f"{source} does not exist. Give a folder") as caught:
        FrozenTarget.load(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["nobody/nothing", "gpt2-of-nobody"])
def test_an_unreachable_hub_is_one_line_and_quick(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"'{source}'.* is no folder here") as caught:
        FrozenTarget.load(source)
    assert time.monotonic() - begin < 8
    assert "\n" not in str(caught.value)
    assert "Name or service not known" in str(caught.value)


def test_a_hub_id_is_served_from_the_local_cache_when_offline(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    folder.rename(repo / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: (_ for _ in ()).throw(OSError("down")))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "hub"), raising=False)
    with caplog.at_level(logging.INFO, logger="eaglelab"):
        target = FrozenTarget.load("someone/tiny")
    assert target.revision == commit
    assert target.fingerprint.revision == commit
    assert target.source == "someone/tiny"
    assert target.tokenizer is not None
    assert target.fingerprint.same_target(FrozenTarget.load(repo / "snapshots" / commit).fingerprint)


def test_not_a_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        FrozenTarget.load(tmp_path)
    file = tmp_path / "weights.safetensors"
    file.touch()
    with pytest.raises(ValueError, match="is a file, not a model"):
        FrozenTarget.load(file)
    with pytest.raises(ValueError, match="dtype 'int4' is unknown"):
        FrozenTarget.load(tmp_path, dtype="int4")


def test_not_a_causal_language_model(tmp_path: Path) -> None:
    t5 = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="could not be loaded as a causal language model"):
        FrozenTarget.load(tmp_path / "t5")
    bert = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="missing|no causal|no list of"):
        FrozenTarget.load(tmp_path / "bert")


def test_a_base_model_without_its_head_is_refused(tmp_path: Path) -> None:
    build("llama").model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"1 tensors .*\(lm_head\.weight\)"):
        FrozenTarget.load(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ValueError, match="another shape .*layers.3"):
        FrozenTarget.load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(ValueError, match="another shape .*mlp"):
        FrozenTarget.load(folder)


def test_remote_code_needs_consent(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        FrozenTarget.load(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder: Path) -> None:
    tiny_tokenizer(extra=[f"<word{i}>" for i in range(VOCAB)]).save_pretrained(folder)
    with pytest.raises(ValueError, match=f"embedding has only {VOCAB} rows"):
        FrozenTarget.load(folder)
