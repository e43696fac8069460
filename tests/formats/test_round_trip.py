"""Out, in, and out again: the same bytes, the same numbers, and a clear word where a format cannot hold a drafter."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig

from eaglelab.formats import export_drafter, exporting, import_drafter
from eaglelab.target import FrozenTarget, ManifestMismatch
from eaglelab.training.run_folder import RunFolder
from tests.formats.conftest import make_run

FILES = ("README.md", "config.json", "eaglelab.json", "model.safetensors")
NO_BIAS = {"drafter": {"fc_bias": False}}
REDUCED = {"draft_vocab_size": 40}

# variant, its settings, format
FITTING = [
    ("eagle", {}, "eagle"),
    ("eagle", NO_BIAS, "eagle"),
    ("eagle", NO_BIAS, "vllm"),
    ("eagle", {}, "sglang"),
    ("eagle", NO_BIAS, "sglang"),
    ("hass", {}, "eagle"),
    ("hass", NO_BIAS, "vllm"),
    ("eagle3", REDUCED, "eagle3"),
    ("eagle3", REDUCED, "speculators"),
    ("eagle3", REDUCED, "vllm"),
    ("eagle3", REDUCED, "sglang"),
    ("eagle3", {}, "eagle3"),
    ("eagle3", {}, "speculators"),
    ("eagle3", {}, "vllm"),
    ("eagle3", {"taps": [0, 3, 7]} | REDUCED, "speculators"),
    ("eagle3", {"taps": [3, 5]} | REDUCED, "vllm"),
    ("eagle3", {"taps": [1, 3, 5, 6]} | REDUCED, "sglang"),
]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def outputs(run, target):
    """Hidden states, log-probabilities and target ids of a prompt of nine tokens."""
    drafter = run.load_drafter(target)
    tokens = torch.arange(10)[None] * 7 % target.vocab_size
    features = target.features(tokens[:, :9], drafter.taps)
    taps = torch.cat([features[tap] for tap in drafter.taps], dim=-1)
    hidden = drafter.extend(drafter.new_state(1, 16), taps, tokens[:, 1:], torch.arange(9)[None])
    log_probs = drafter.log_probs(hidden)
    return hidden, log_probs, drafter.to_target_ids(torch.arange(log_probs.shape[-1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("variant", "settings", "name"), FITTING)
def test_export_import_export_gives_the_same_bytes(variant, settings, name, dtype, target, tmp_path):
    run = make_run(tmp_path / "run", target, variant, **settings)
    run.update_metrics({"tau": 2.5, "tau_interval": [2.4, 2.6], "answers": 3, "settings": {"tree": {"name": "chain"}}})
    first = export_drafter(run, name, tmp_path / "first", dtype=dtype)
    drafter = import_drafter(first, target, tmp_path / "imported")
    back = RunFolder.existing(tmp_path / "imported")
    again = export_drafter(back, name, tmp_path / "again", dtype=dtype)
    assert sorted(path.name for path in first.iterdir()) == sorted(FILES)
    for file in FILES:
        assert (first / file).read_bytes() == (again / file).read_bytes(), file
    assert back.manifest().to_dict() == run.manifest().to_dict()
    assert "2.50 (2.40 to 2.60)" in (first / "README.md").read_text()
    assert drafter.manifest.variant == variant
    if dtype == "float32":
        for before, after in zip(outputs(run, target), outputs(back, target), strict=True):
            assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("trained", "name", "expected"),
    [
        ("with", "eagle", "as trained"),
        ("with", "sglang", "as trained"),
        ("with", "vllm", "refused"),
        ("without", "eagle", "none"),
        ("without", "sglang", "zeros"),
        ("without", "vllm", "none"),
        ("zero", "eagle", "zeros"),
        ("zero", "sglang", "zeros"),
        ("zero", "vllm", "none"),
    ],
)
def test_bias_of_fc(trained, name, expected, target, tmp_path):
    settings = NO_BIAS if trained == "without" else {}
    run = make_run(tmp_path / "run", target, "eagle", zero_bias=trained == "zero", **settings)
    if expected == "refused":
        with pytest.raises(
            ValueError, match=r"format=vllm has no bias in fc.*fc_bias=false, or use format=eagle or format=sgl"
        ):
            export_drafter(run, name, tmp_path / "out")
        return
    out = export_drafter(run, name, tmp_path / "out", dtype="float32")
    bias = load_file(out / "model.safetensors").get("fc.bias")
    # a written true would give the attention biases in vLLM and SGLang; absent is true to SafeAILab
    assert config_of(out).get("bias", "absent") == ("absent" if bias is not None else False)
    if expected == "none":
        assert bias is None
    elif expected == "zeros":
        assert bias is not None and not bias.any()
    else:
        assert torch.equal(bias, run.load_network().fc.bias)
    import_drafter(out, target, tmp_path / "in")
    back = RunFolder(tmp_path / "in")
    assert back.manifest().drafter["fc_bias"] == (trained != "without")
    for before, after in zip(outputs(run, target), outputs(back, target), strict=True):
        assert torch.equal(before, after)


def test_eagle31_goes_out_where_it_can_be_said(target, tmp_path):
    settings = {"fc_norm": True, "recurrence": "post_norm"} | REDUCED
    run = make_run(tmp_path / "run", target, "eagle3", **settings)
    with pytest.raises(ValueError, match="format=eagle3 has no key for the drafter's fc_norm=True"):
        export_drafter(run, "eagle3", tmp_path / "eagle3")
    for name in ("vllm", "sglang", "speculators"):
        out = export_drafter(run, name, tmp_path / name, dtype="float32")
        assert config_of(out)["fc_norm"] is config_of(out)["norm_output"] is True
        assert {f"fc_norm.{i}.weight" for i in range(3)} < set(load_file(out / "model.safetensors"))
        import_drafter(out, target, tmp_path / f"{name}-in")
        for before, after in zip(
            outputs(run, target), outputs(RunFolder(tmp_path / f"{name}-in"), target), strict=True
        ):
            assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("variant", "settings", "name", "message"),
    [
        ("eagle", {}, "eagle3", "format=eagle3 cannot hold a drafter of variant eagle; use eagle or vllm or sglang"),
        ("hass", {}, "speculators", "cannot hold a drafter of variant hass; use eagle or vllm or sglang"),
        ("eagle3", REDUCED, "eagle", "variant eagle3; use eagle3 or speculators or vllm or sglang"),
        ("eagle3", REDUCED, "gguf", "format='gguf' is not one of eagle, eagle3"),
        ("eagle3", {"taps": [1, 3, 5]}, "eagle3", r"taps=\[1, 3, 5\]; use format=speculators or vllm or sglang"),
        ("eagle3", {"taps": [5, 1, 3]}, "vllm", "servers concatenate the streams in ascending order"),
        ("eagle3", {"taps": [1, 3, "final"]}, "vllm", "no format has a name for the state after the final norm"),
        ("eagle3", {"drafter": {"fc_bias": True}}, "speculators", "no bias in fc.*variant.drafter.fc_bias=false$"),
        ("eagle3", {"drafter": {"fc_bias": True}}, "sglang", "no bias in fc.*variant.drafter.fc_bias=false$"),
    ],
)
def test_what_a_format_cannot_hold(variant, settings, name, message, target, tmp_path):
    run = make_run(tmp_path / "run", target, variant, **settings)
    with pytest.raises(ValueError, match=message):
        export_drafter(run, name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_taps_by_each_readers_count(target, tmp_path):
    """vLLM: layers before the stream. SGLang's nested list: one less; the published taps are its default."""
    published = make_run(tmp_path / "published", target, "eagle3", **REDUCED)
    custom = make_run(tmp_path / "custom", target, "eagle3", taps=[0, 3, 7], **REDUCED)
    key = "eagle_aux_hidden_state_layer_ids"

    def config(run, name):
        return config_of(export_drafter(run, name, tmp_path / f"{run.path.name}-{name}", overwrite=True))

    assert config(published, "vllm")[key] == [2, 4, 5]
    assert config(published, "speculators")[key] == [2, 4, 5]
    assert not {key, "eagle_config"} & set(config(published, "sglang"))
    assert not {key, "eagle_config"} & set(config(published, "eagle3"))
    assert config(custom, "vllm")[key] == [0, 3, 7]
    assert "eagle_config" not in config(custom, "vllm")
    assert config(custom, "sglang")[key] == [0, 3, 7]
    assert config(custom, "sglang")["eagle_config"] == {key: [-1, 2, 6]}


def test_speculators_config(target, tmp_path):
    run = make_run(tmp_path / "run", target, "eagle3", **REDUCED)
    out = export_drafter(run, "speculators", tmp_path / "out", verifier="some/target", draft_tokens=4)
    config, names = config_of(out), set(load_file(out / "model.safetensors"))
    assert "model_type" not in config
    assert config["norm_before_residual"] is False  # written out: readers disagree on its absence
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["speculators_config"]["verifier"] == {
        "architectures": ["LlamaForCausalLM"],
        "name_or_path": "some/target",
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert {"embed_tokens.weight", "layers.0.hidden_norm.weight", "d2t", "t2d"} < names
    assert not any(name.startswith("midlayer") for name in names)


def test_maps_follow_the_published_convention(target, tmp_path):
    run = make_run(tmp_path / "run", target, "eagle3", **REDUCED)
    tensors = load_file(export_drafter(run, "vllm", tmp_path / "out") / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(40) + tensors["d2t"], tensors["t2d"].nonzero().flatten())
    whole = make_run(tmp_path / "whole", target, "eagle3")
    assert not {"d2t", "t2d"} & set(
        load_file(export_drafter(whole, "vllm", tmp_path / "whole-out") / "model.safetensors")
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_and_positions_in_old_and_new_spelling(rope, target, tmp_path):
    shape = {"drafter": {"rope_parameters": rope, "max_position_embeddings": 48}} | REDUCED
    run = make_run(tmp_path / "run", target, "eagle3", **shape)
    config = config_of(export_drafter(run, "vllm", tmp_path / "out", dtype="float32"))
    assert config["max_position_embeddings"] == 48
    whole = LlamaConfig(**json.loads(json.dumps(config))).rope_parameters
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert old["rope_theta"] == rope["rope_theta"]
    assert (old["rope_scaling"] is None) == (rope["rope_type"] == "default")
    assert {k: v for k, v in LlamaConfig(**old).rope_parameters.items() if k in rope} == rope
    assert {k: v for k, v in whole.items() if k in rope} == rope
    import_drafter(tmp_path / "out", target, tmp_path / "in")
    for before, after in zip(outputs(run, target), outputs(RunFolder(tmp_path / "in"), target), strict=True):
        assert torch.equal(before, after)


def linear(theta):
    return {"drafter": {"rope_parameters": {"rope_type": "linear", "rope_theta": theta, "factor": 4.0}}}


@pytest.mark.parametrize(("variant", "name"), [("eagle", "eagle"), ("eagle3", "eagle3")])
def test_safeailabs_own_attention(variant, name, target, tmp_path):
    """It lets rope_scaling of exactly these two keys through, and takes base 10000 then."""
    run = make_run(tmp_path / "run", target, variant, **linear(10000.0))
    out = export_drafter(run, name, tmp_path / "out", dtype="float32")
    assert config_of(out)["rope_scaling"] == {"type": "linear", "factor": 4.0}
    import_drafter(out, target, tmp_path / "in")
    assert RunFolder(tmp_path / "in").manifest() == run.manifest()
    plain = {"drafter": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}}
    assert config_of(export_drafter(make_run(tmp_path / "plain", target, variant, **plain), name, tmp_path / "fine"))
    other = make_run(tmp_path / "other", target, variant, **linear(500000.0))
    with pytest.raises(ValueError, match="rope_type=linear at 500000; use format=vllm or format=sglang"):
        export_drafter(other, name, tmp_path / "refused")
    wide = make_run(tmp_path / "wide", target, variant, drafter={"head_dim": 16})
    if name == "eagle":
        with pytest.raises(ValueError, match="this drafter has head_dim=16; use format=vllm"):
            export_drafter(wide, name, tmp_path / "wide-out")
    else:
        assert config_of(export_drafter(wide, name, tmp_path / "wide-out"))["head_dim"] == 16


def test_an_export_knows_its_target(target, eagle_target, tmp_path):
    run = make_run(tmp_path / "run", target, "eagle3", **REDUCED)
    out = export_drafter(run, "vllm", tmp_path / "out")
    with pytest.raises(ManifestMismatch, match="trained for another target.*field target.weights"):
        import_drafter(out, eagle_target, tmp_path / "in")
    assert not (tmp_path / "in").exists()
    import_drafter(out, eagle_target, tmp_path / "in", trust="target")
    assert RunFolder(tmp_path / "in").manifest().target.digests == eagle_target.fingerprint.digests


@pytest.mark.parametrize("change", ["config", "map"])
def test_an_export_that_was_changed_is_noticed(change, target, tmp_path):
    run = make_run(tmp_path / "run", target, "eagle3", **REDUCED)
    out = export_drafter(run, "vllm", tmp_path / "out", dtype="float32")
    if change == "config":
        (out / "config.json").write_text(json.dumps(config_of(out) | {"rope_theta": 5.0, "rope_parameters": None}))
    else:
        tensors = load_file(out / "model.safetensors")
        tensors["t2d"] = torch.arange(target.vocab_size) < 40
        tensors["d2t"] = torch.zeros(40, dtype=torch.int64)
        exporting.save_file(tensors, out / "model.safetensors")
    field = {"config": "drafter.rope_parameters", "map": "draft_vocabulary"}[change]
    with pytest.raises(ManifestMismatch, match=f"was changed after its export: field {field}"):
        import_drafter(out, target, tmp_path / "in")


def test_nothing_is_overwritten_and_nothing_half_written(target, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", target, "eagle")
    out = tmp_path / "out"
    export_drafter(run, "eagle", out)
    with pytest.raises(ValueError, match="is there already; pass overwrite=true"):
        export_drafter(run, "eagle", out)
    (out / "config.json").unlink()
    export_drafter(run, "eagle", out, overwrite=True)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert sorted(before) == sorted(FILES)

    def fail(*_args, **_more):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "model_card", fail)
        for place in (out, tmp_path / "other"):
            with pytest.raises(OSError, match="disk full"):
                export_drafter(run, "eagle", place, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="holds something that eaglelab did not write"):
        export_drafter(run, "eagle", tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_a_target_that_scales_its_embedding(tmp_path):
    """Readers that take the target's table as it is stored would feed the drafter something else."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4, head_dim=8
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    gemma = FrozenTarget.load(tmp_path / "gemma")
    run = make_run(tmp_path / "run", gemma, "eagle3", drafter={"max_position_embeddings": 64}, **REDUCED)
    with pytest.raises(ValueError, match="scales its embedding"):
        export_drafter(run, "vllm", tmp_path / "vllm")
    out = export_drafter(run, "speculators", tmp_path / "speculators", dtype="float32")
    stored = load_file(out / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(stored, gemma.embed(torch.arange(97)))
    import_drafter(out, gemma, tmp_path / "in")


LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LAYER += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
FEATURE = {"fc.weight", *(f"layers.0.{name}.weight" for name in LAYER)}
FUSED = {"d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight"}
FUSED |= {f"midlayer.{name}.weight" for name in (*LAYER, "input_layernorm", "hidden_norm")}


@pytest.mark.parametrize(
    ("variant", "settings", "name", "names"),
    [
        ("eagle", {}, "eagle", FEATURE | {"fc.bias", "embed_tokens.weight"}),
        ("hass", NO_BIAS, "eagle", FEATURE | {"embed_tokens.weight"}),
        ("eagle", NO_BIAS, "vllm", FEATURE),
        ("eagle", NO_BIAS, "sglang", FEATURE | {"fc.bias"}),
        ("eagle3", REDUCED, "eagle3", FUSED),
        ("eagle3", REDUCED, "vllm", FUSED),
        ("eagle3", REDUCED, "sglang", FUSED),
        ("eagle3", {}, "vllm", FUSED - {"d2t", "t2d"}),
        (
            "eagle3",
            REDUCED,
            "speculators",
            {name.replace("midlayer", "layers.0") for name in FUSED} | {"embed_tokens.weight"},
        ),
    ],
)
def test_the_file_holds_what_the_reader_allocates(variant, settings, name, names, target, tmp_path):
    """Readers load by name, some of them in silence: no name may be missing, and none may be there for nothing."""
    run = make_run(tmp_path / "run", target, variant, **settings)
    assert set(load_file(export_drafter(run, name, tmp_path / "out") / "model.safetensors")) == names
