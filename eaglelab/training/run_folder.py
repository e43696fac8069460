"""A run folder: what training leaves behind and every other verb starts from.

.hydra/         the resolved configuration and the overrides
manifest.json   every semantic address that the weights depend on
metrics.json    "training": {...}, and the figures of the latest evaluation
checkpoints/    last.ckpt, best-*.ckpt
csv/ or wandb/  the logger's files
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from eaglelab.drafters import DrafterConfig, DraftNetwork, SlotDrafter
from eaglelab.target import FeatureManifest, FrozenTarget
from eaglelab.variants import VARIANTS


class RunFolder:
    """Reads and writes the files above.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def existing(cls, path: str | Path) -> RunFolder:
        """A folder that holds a run.

        Raises:
            ValueError: it does not.
        """
        folder = cls(path)
        if not folder.manifest_path.is_file():
            what = "has no manifest.json" if folder.path.is_dir() else "does not exist"
            raise ValueError(
                f"run={path} {what}; give the folder that `python train.py` printed, with its manifest.json"
            )
        return folder

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, name: str = "last") -> Path:
        """The file behind ``last``, ``best`` or an explicit path.

        Raises:
            ValueError: there is none.
        """
        if name == "best":
            found = sorted(self.checkpoints.glob("best*.ckpt"), key=lambda p: p.stat().st_mtime)
            path = found[-1] if found else self.checkpoints / "best.ckpt"
        else:
            path = self.checkpoints / "last.ckpt" if name == "last" else Path(name)
        if not path.is_file():
            raise ValueError(
                f"no checkpoint at {path}; train first, or name a file (a run folder's are in {self.checkpoints})"
            )
        return path

    def manifest(self) -> FeatureManifest:
        return FeatureManifest.load(self.manifest_path)

    def read_metrics(self) -> dict[str, Any]:
        """``metrics.json``, empty where there is none yet."""
        path = self.path / "metrics.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def update_metrics(self, figures: dict[str, Any], name: str = "metrics.json") -> Path:
        """Merge ``figures`` into a JSON file of the folder; the old file stays whole until the new one is."""
        path = self.path / name
        old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(old | figures, indent=1) + "\n", encoding="utf-8")
        os.replace(aside, path)
        return path

    def load_target(self, *, source: str | None = None, dtype: str | None = None, device: str = "cpu") -> FrozenTarget:
        """The target that the drafter was trained for.

        Args:
            source: where it lives now, if not where the manifest says.
            dtype: ``float32``, ``bfloat16``, ``float16``; None: as in training.

        Raises:
            ManifestMismatch: ``source`` is another model, revision or tokenizer.
        """
        manifest = self.manifest()
        target = FrozenTarget.load(
            source or manifest.target.source,
            dtype=dtype or manifest.feature_dtype,
            device=device,
            revision=manifest.target.revision if source is None else None,
        )
        present = dataclasses.replace(manifest, target=target.fingerprint)
        manifest.require_same(present, ("target",), f"{self.path} holds a drafter of another target")
        return target

    def load_network(self, checkpoint: str = "last") -> DraftNetwork:
        """The drafter's network with the checkpoint's weights, fp32 on the CPU.

        Raises:
            ValueError: no such checkpoint, or its tensors are not exactly the drafter's, or not finite.
        """
        manifest = self.manifest()
        network = VARIANTS[manifest.variant].build_network(DrafterConfig(**manifest.drafter))
        weights = {
            name.removeprefix("network."): tensor
            for name, tensor in read_checkpoint(self.checkpoint(checkpoint))["state_dict"].items()
            if name.startswith("network.")
        }
        try:
            network.load_state_dict(weights, strict=True)
        except RuntimeError as error:
            raise ValueError(f"{self.checkpoint(checkpoint)} does not hold this drafter: {error}") from error
        for name, tensor in weights.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(
                    f"{self.checkpoint(checkpoint)}: {name} holds NaN or infinite values, the training diverged; use "
                    "an earlier checkpoint of the run, or train again with a smaller optim.lr"
                )
        return network

    def load_drafter(self, target: FrozenTarget, checkpoint: str = "last") -> SlotDrafter:
        """The drafter's weights behind the decoding protocol, in the target's dtype and on its device.

        Raises:
            ValueError: see :meth:`load_network`.
        """
        network = self.load_network(checkpoint).to(device=target.device, dtype=target.dtype)
        return SlotDrafter(network, target, self.manifest().taps)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A training checkpoint as plain data; nothing in it is executed.

    Raises:
        ValueError: the file is damaged or holds anything but tensors and plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own words tell how to run what is in it
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is damaged, or holds more than tensors and plain values, "
            "which is not read; use another one of the run"
        ) from None
    except (RuntimeError, EOFError, ValueError) as error:
        reason = str(error).partition(". ")[0].splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read as a checkpoint ({reason}); use another one of the run") from error
