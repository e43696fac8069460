"""The package as a wheel, outside the checkout: configs, target and data travel with it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("eaglelab-*.whl")
    return path


def test_wheel_holds_code_configs_and_assets_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "eaglelab/cli/main.py",
        "eaglelab/configs/train.yaml",
        "eaglelab/configs/variant/eagle.yaml",
        "eaglelab/assets/target/model.safetensors",
        "eaglelab/assets/data/train.jsonl",
        "eaglelab/assets/suites/mt_bench.jsonl",
        "eaglelab/configs/comparison/three_variants.yaml",
    ):
        assert name in names, name
    assert {name.split("/")[0].split("-")[0] for name in names} == {"eaglelab"}


def test_the_installed_wheel_trains_from_an_empty_folder(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    work = tmp_path / "work"
    work.mkdir()
    job = ["train", "debug=fast", "hydra.run.dir=run"]
    site = str(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {site!r}); from eaglelab.cli.main import main; main({job!r})"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=work, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    config = (work / "run" / ".hydra" / "hydra.yaml").read_text()
    assert str(tmp_path / "site" / "eaglelab" / "configs") in config
    assert (work / "run" / "checkpoints" / "last.ckpt").is_file()
