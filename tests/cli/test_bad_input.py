"""Every wrong input ends in one line, what, where and the way out, and leaves everything as it was."""

import contextlib
import json
import os
import resource
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eaglelab.assets import bundled_target
from tests.cli.bad_inputs import CASES, FILES, Case
from tests.cli.conftest import run


@pytest.fixture(scope="session")
def damaged(trained, tmp_path_factory) -> Path:
    """Runs and targets with one thing wrong each."""
    folder = tmp_path_factory.mktemp("damaged")

    def copy(source: Path, name: str, *without: str) -> Path:
        """Linked, but for the files that are left out."""
        return Path(
            shutil.copytree(
                source, folder / name, copy_function=os.link, ignore=lambda _, names: {n for n in names if n in without}
            )
        )

    last = trained / "checkpoints" / "last.ckpt"
    cut = copy(trained, "run-truncated", "last.ckpt")
    (cut / "checkpoints" / "last.ckpt").write_bytes(last.read_bytes()[:100_000])
    broken = torch.load(last, weights_only=True)
    broken["state_dict"]["network.fc.weight"][0, 0] = float("nan")
    torch.save(broken, copy(trained, "run-nan", "last.ckpt") / "checkpoints" / "last.ckpt")
    (copy(trained, "run-no-json", "manifest.json") / "manifest.json").write_text("{")

    target, weights = Path(bundled_target()), "model.safetensors"
    copy(target, "target-without-weights", weights)
    (copy(target, "target-truncated", weights) / weights).write_bytes((target / weights).read_bytes()[:5000])
    tensors = load_file(target / weights)
    half = copy(target, "target-half-downloaded", weights)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    places = {name: names[number % 2] for number, name in enumerate(tensors)}
    save_file({k: v for k, v in tensors.items() if places[k] == names[0]}, half / names[0], {"format": "pt"})
    (half / f"{weights}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    tensors["model.layers.0.input_layernorm.weight"][0] = float("nan")
    save_file(tensors, copy(target, "target-nan", weights) / weights, {"format": "pt"})
    bare = copy(target, "target-without-template", "chat_template.jinja", "tokenizer_config.json")
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    copy(target, "target-without-tokenizer", *(path.name for path in target.glob("tokenizer*")))
    (copy(target, "target-no-json", "config.json") / "config.json").write_text("{")
    return folder


def contents(*folders: Path) -> dict[str, tuple[int, int]]:
    """Every file's size and time; locks, which stay behind for the next process, left out."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else (0, 0)
        for folder in folders
        for path in folder.rglob("*")
        if not path.name.endswith(".lock")
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_input_ends_in_one_line_and_changes_nothing(case: Case, trained, damaged, tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    places = tmp_path, trained, damaged
    before = contents(*places)
    done = run(*shlex.split(case.arguments.format(run=trained, bad=damaged)), cwd=tmp_path, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.replace("\r", "\n").strip().splitlines()
    assert [line for line in lines if "error" in line.lower()] == lines[-1:]
    told = lines[-1]
    assert told.rpartition("error: ")[0].strip() == ""
    place = 0
    for text in case.says:
        assert text in told[place:], told
        place = told.index(text, place) + len(text)
    assert "weights_only" not in told, "the way around a safety check is no way out"
    assert contents(*places) == before


def test_every_verb_has_wrong_inputs():
    from eaglelab.cli.main import VERBS

    assert {case.arguments.split()[0] for case in CASES} == set(VERBS)
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("verb", ["", "trian", "../train", "__init__"])
def test_an_unknown_verb_lists_the_known_ones(verb, tmp_path):
    done = run(verb, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "  evaluate " in done.stderr
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def disk_full(most: int) -> Iterator[None]:
    """Within, no file grows beyond so many bytes: the system refuses the write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "arguments",
    [
        "cache data.limit=4 data.val_limit=2 out=store",
        "export run={run} format=eagle out=ex",
        "import source={bad}/exported target.source=bundled out=in",
        "train data.limit=8 data.val_limit=2 trainer.max_steps=1 logger=none hydra.run.dir=new",
    ],
)
def test_a_full_disk_ends_in_one_line_and_leaves_nothing_that_looks_whole(arguments, trained, damaged, tmp_path):
    if "exported" in arguments:
        run("export", f"run={trained}", "format=eagle", f"out={damaged}/exported", cwd=tmp_path)
    with disk_full(64 * 1024):
        done = run(*shlex.split(arguments.format(run=trained, bad=damaged)), cwd=tmp_path, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "free some space" in done.stderr.strip().splitlines()[-1], done.stderr
    if arguments.startswith("cache"):  # finished shards stay, for the same command to go on
        done = run("cache", "verify", "store=store", cwd=tmp_path, check=False)
        assert done.returncode == 1
        assert "store is unfinished" in done.stderr
    else:
        assert [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".ckpt", ".bin")] == []
