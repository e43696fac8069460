"""Who counts as logged in to W&B."""

import pytest

from eaglelab.training.loggers import logged_in


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
