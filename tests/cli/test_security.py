"""What comes from elsewhere, weights, data and configurations, is read as data: it runs nothing and names no place."""

import ast
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from eaglelab.data import load_conversations
from eaglelab.target import FrozenTarget, HeadOnlyTarget
from eaglelab.target.shape import read_description
from eaglelab.training.run_folder import read_checkpoint
from tests.cli.conftest import run
from tests.oracles.scripted import tiny_llama
from tests.target.target_tokenizer import tiny_tokenizer

ROOT = Path(__file__).parents[2]
SHIPPED = [ROOT / "train.py", *(ROOT / "eaglelab").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]


# ---- source ---------------------------------------------------------------------------------------------------------

FORBIDDEN = {"pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "dill.load"}
FORBIDDEN |= {"eval", "exec", "os.system", "yaml.load", "yaml.unsafe_load"}


def unsafe_calls(text: str) -> list[str]:
    """Calls that run what they read; `torch.load` and Lightning's readers must say weights_only=True."""
    found = []
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call):
            continue
        name, given = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
        reads = name == "torch.load" or name.endswith(".load_from_checkpoint") or "ckpt_path" in given
        if reads and given.get("weights_only") != "True":
            found.append(f"{name} without weights_only=True")
        if name in FORBIDDEN or given.get("allow_pickle") == "True" or given.get("shell") == "True":
            found.append(name)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "trainer.fit(module, data, ckpt_path=path)",
        "Module.load_from_checkpoint(path)",
        "with open(path, 'rb') as file:\n    pickle.load(file)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "eval(text)",
        "yaml.load(text)",
    ],
)
def test_the_search_finds_what_it_is_for(text):
    assert len(unsafe_calls(text)) == 1


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_runs_what_it_reads(path):
    known = {"experiments/mutation/run.py": ["exec"]}  # it runs this project's own source, changed on purpose
    assert unsafe_calls(path.read_text(encoding="utf-8")) == known.get(str(path.relative_to(ROOT)), [])


def test_remote_code_is_off_in_every_signature_and_configuration():
    defaults = []
    for path in SHIPPED:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                named = [*zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)]
                named += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                defaults += [d for a, d in named if a.arg == "trust_remote_code" and d is not None]
            elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert not (isinstance(node.value, ast.Constant) and node.value.value), f"{path} switches it on"
    assert len(defaults) >= 2
    assert {ast.unparse(default) for default in defaults} == {"False"}
    configured = [
        line
        for path in (ROOT / "configs").rglob("*.yaml")
        for line in re.findall(r"^\s*trust_remote_code:.*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(configured) >= 3
    assert {line.split(":")[1].strip() for line in configured} == {"false"}


# ---- weights --------------------------------------------------------------------------------------------------------


class Code:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "it_ran"


def poisons(mark: Path, folder: Path) -> list[Path]:
    """A checkpoint with code: torch's own format, torch's old one, and a bare pickle."""
    content = {"state_dict": {"network.fc.weight": torch.zeros(2)}, "manifest": Code(mark)}
    paths = [folder / f"{kind}.ckpt" for kind in ("zipped", "legacy", "bare")]
    torch.save(content, paths[0])
    torch.save(content, paths[1], _use_new_zipfile_serialization=False)
    paths[2].write_bytes(pickle.dumps(content))
    return paths


@pytest.mark.parametrize("number", range(3), ids=["zipped", "legacy", "bare"])
def test_a_checkpoint_with_code_is_refused_and_does_not_run(number, mark, tmp_path):
    path = poisons(mark, tmp_path)[number]
    with pytest.raises(ValueError, match="cannot be read as a checkpoint") as told:
        read_checkpoint(path)
    assert "weights_only" not in str(told.value)  # no word of how to run it
    assert not mark.exists()
    if number < 2:
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())
    assert mark.exists(), "read as torch or Python would, it runs"


def test_every_command_refuses_a_poisoned_run(trained, mark, tmp_path):
    poisoned = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.copy(poisons(mark, tmp_path)[0], poisoned / "checkpoints" / "last.ckpt")
    small = ["data.limit=4", "data.val_limit=2", "trainer.max_steps=1", "logger=none"]
    for command in (
        ["evaluate", f"run={poisoned}", "limit=1"],
        ["generate", f"run={poisoned}", "prompt=a"],
        ["export", f"run={poisoned}", "format=eagle", "out=exported"],
        ["doctor", f"run={poisoned}", "limit=2"],
        ["train", *small, f"hydra.run.dir={poisoned}", "ckpt_path=last"],
        ["train", *small, "hydra.run.dir=new", f"init_from={poisoned}"],
    ):
        done = run(*command, cwd=tmp_path, check=False)
        assert done.returncode == 1, command
        assert "cannot be read as a checkpoint" in done.stderr, done.stderr
        assert not mark.exists(), command


def test_a_targets_weights_with_code_do_not_run(mark, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Code(mark)}, tmp_path / "target" / "pytorch_model.bin")
    for load in (FrozenTarget.load, HeadOnlyTarget.load):
        with pytest.raises(ValueError, match="could not be loaded"):
            load(tmp_path / "target")
        assert not mark.exists()


def test_a_targets_own_code_runs_only_when_it_is_trusted(mark, tmp_path):
    folder = tmp_path / "target"
    model = tiny_llama()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class C(LlamaConfig):\n    model_type = 'homemade'\n"
        "class M(LlamaForCausalLM):\n    config_class = C\n"
    )
    for load in (FrozenTarget.load, HeadOnlyTarget.load):
        with pytest.raises(ValueError, match="pass trust_remote_code=true"):
            load(folder)
    with pytest.raises(ValueError, match="pass trust_remote_code=true"):
        read_description(folder)
    assert not mark.exists()
    FrozenTarget.load(folder, trust_remote_code=True)
    assert mark.exists()


# ---- names from data ------------------------------------------------------------------------------------------------

OUTSIDE = ["../../outside", "/tmp/eaglelab-outside", "..\\outside", "a/../../outside"]


def test_ids_and_categories_name_no_place(trained, tmp_path):
    """Prompts whose ids, categories and texts look like paths leave files only where the command was told to."""
    work = tmp_path / "deep" / "er"
    work.mkdir(parents=True)
    rows = [{"question_id": name, "id": name, "category": name, "turns": [f"{name}?"]} for name in OUTSIDE]
    (work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    copy = Path(shutil.copytree(trained, work / "run"))
    before = set(tmp_path.rglob("*"))
    few = ["max_new_tokens=3", "batch=4"]
    run("evaluate", f"run={copy}", "data.path=prompts.jsonl", *few, "telemetry=rounds.jsonl", cwd=work)
    run("generate", f"run={copy}", "data=prompts.jsonl", "out=answers.jsonl", "keep=all", *few, cwd=work)
    run("report", "trees=rounds.jsonl", "out=trees.html", cwd=work)
    new = {str(path.relative_to(work)) for path in set(tmp_path.rglob("*")) - before}
    known = {"rounds.jsonl", "answers.jsonl", "answers.jsonl.left_out", ".answers.jsonl.lock", "trees.html"}
    assert {name for name in new if not name.startswith("run/evaluations")} <= known
    assert {one.id for one in load_conversations(str(work / "answers.jsonl"))} == set(OUTSIDE)
    assert not Path(OUTSIDE[1]).exists()


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_of_compared_runs_name_no_place(name, trained, tmp_path):
    runs = f"runs={{{json.dumps(name)}: {trained}}}"
    done = run("compare", runs, "out=compared", "limit=1", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "no name of a drafter" in done.stderr or "cannot read the setting" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []
