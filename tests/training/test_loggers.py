"""Who counts as logged in to W&B, and life without it."""

import subprocess
import sys

import pytest

from eaglelab.cli.decoding import Telemetry
from eaglelab.training.loggers import logged_in, wandb_logger, wandb_run


@pytest.mark.parametrize(
    ("lines", "expected"),
    [("machine api.wandb.ai login user password key\n", True), ("machine elsewhere login a password b\n", False)],
)
def test_netrc(lines, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    (tmp_path / "netrc").write_text(lines)
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert logged_in() is expected
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert logged_in()


def test_no_netrc(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert not logged_in()


@pytest.fixture
def no_wandb(tmp_path, monkeypatch):
    """An environment without wandb, and with a folder of that name where W&B kept its runs."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])


@pytest.mark.parametrize("ask", [wandb_logger, wandb_run, lambda: Telemetry(None, wandb=True)])
def test_without_wandb_what_asks_for_it_says_so(ask, no_wandb):
    with pytest.raises(ValueError, match=r"wandb.* needs the package wandb, which is not installed: pip install wandb"):
        ask()


def test_nothing_imports_wandb_before_it_is_asked_for():
    """What trains, decodes and evaluates, and every verb's module."""
    code = """
import importlib, sys
from eaglelab.cli.main import VERBS
import eaglelab.comparison, eaglelab.evaluation, eaglelab.formats, eaglelab.training, lightning.pytorch.loggers
for verb in VERBS:
    importlib.import_module(f"eaglelab.cli.{verb}{'_' if verb == 'import' else ''}")
sys.exit("wandb" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
