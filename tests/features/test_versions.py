"""The record of versions."""

import platform
from importlib.metadata import PackageNotFoundError, version

from eaglelab import __version__
from eaglelab.features import manifest


def test_a_checkout_that_is_not_installed_has_its_own_version(monkeypatch):
    def without_eaglelab(name: str) -> str:
        if name == "eaglelab":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(manifest, "version", without_eaglelab)
    versions = manifest.software_versions()
    assert versions["eaglelab"] == __version__
    assert versions["python"] == platform.python_version()
    assert set(versions) == {"python", "eaglelab", "torch", "transformers", "lightning"}
