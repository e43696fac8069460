"""A target without its layers: embedding, head and identity, for training from stored features."""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from eaglelab import assets
from eaglelab.target import loading
from eaglelab.target.fingerprint import stored_weights
from eaglelab.target.frozen import FrozenTarget
from eaglelab.target.random_llama import LlamaShape

log = logging.getLogger(__name__)

CannotStandAlone = (ValueError, RuntimeError, IndexError, AttributeError, TypeError)
"""What the library raises where one layer is no model of its family."""


class HeadOnlyTarget(FrozenTarget):
    """Embeds tokens and reads features as the whole target does, and has its fingerprint; runs nothing.

    Where the checkpoint allows, only one layer is read from the disk, so that the checks of a target can be made; it is
    dropped afterwards.
    """

    @classmethod
    def load(cls, source: str | Path, **options: Any) -> HeadOnlyTarget:
        """Load embedding and head; arguments as for :meth:`FrozenTarget.load`.

        Raises:
            ValueError: as there.
        """
        bundled = source == "bundled"
        where = assets.bundled_target() if bundled else source
        settings = {**loading.DEFAULTS, **options}
        target = None
        if settings["gguf_file"] is None and Path(where).suffix != ".gguf":
            try:
                target, config = cls._with_one_layer(where, settings)
            except CannotStandAlone as error:
                log.info("loading all layers of %s: one alone is no model of its family (%s)", source, error)
        if target is None:
            model, tokenizer, place = loading.load(where, **settings)
            target, config = cls(model, tokenizer, revision=place.revision, location=place), model.config
            _ = target.fingerprint  # may need the weights
        files = target.checkpoint_files
        target.source = "bundled" if bundled or files is None else files.source
        target._drop_layers(config)
        return target

    @classmethod
    def random(cls, shape: LlamaShape, *, positions: int, dtype: torch.dtype, device: str = "cpu") -> HeadOnlyTarget:
        """Of a random Llama of that shape; arguments as for :meth:`LlamaShape.build`."""
        one = dataclasses.replace(shape, num_layers=1)
        target = cls(one.build(positions=positions, dtype=dtype, device=device))
        target._drop_layers(shape.config(positions))
        return target

    @classmethod
    def _with_one_layer(cls, source: str | Path, settings: dict[str, Any]) -> tuple[Self, Any]:
        """The target with the first of its layers, and its whole config.

        Raises:
            ValueError: no such model, or its weights have to be loaded to be identified.
        """
        whole, short = _configs(source, settings)
        with quiet():
            model, tokenizer, place = loading.load(source, **settings, extra={"config": short})
        if place.folder is None or stored_weights(place.folder) is None:
            raise ValueError("the weights are identified by what is loaded")
        return cls(model, tokenizer, revision=place.revision, location=place), whole

    def _drop_layers(self, config: Any) -> None:
        """Free the layers, and be the target of ``config`` again."""
        decoder, layers = self._wiring.decoder, self._wiring.layers
        for name, child in list(decoder.named_children()):
            if isinstance(child, nn.ModuleList) and list(child) == list(layers):
                setattr(decoder, name, nn.ModuleList())
        layers.clear()  # type: ignore[attr-defined]
        self.model.config = config
        self.text_config = config.get_text_config()
        self.num_layers = int(self.text_config.num_hidden_layers)

    def features(self, *args: Any, **kwargs: Any) -> Any:
        self._require_layers()
        return super().features(*args, **kwargs)

    def forward_rows(self, *args: Any, **kwargs: Any) -> Any:
        self._require_layers()
        return super().forward_rows(*args, **kwargs)

    def new_cache(self, *args: Any, **kwargs: Any) -> Any:
        self._require_layers()
        return super().new_cache(*args, **kwargs)

    def _require_layers(self) -> None:
        raise ValueError(
            "this target was loaded without its layers, for training from a feature store; load it whole "
            "(FrozenTarget.load) to run it"
        )


def _configs(source: str | Path, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The checkpoint's config, and the same with one layer."""
    from transformers import AutoConfig

    place = loading.locate(source, settings["revision"], None)
    options = {"trust_remote_code": settings["trust_remote_code"], "local_files_only": place.offline}
    whole = AutoConfig.from_pretrained(place.name, revision=place.revision, **options)
    short = copy.deepcopy(whole)
    text = short.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    text.num_hidden_layers = 1
    return whole, short


class quiet:
    """The library reports the layers that were left out as unexpected."""

    def __enter__(self) -> None:
        from transformers.utils import logging as library

        self._level = library.get_verbosity()
        library.set_verbosity_error()

    def __exit__(self, *error: object) -> None:
        from transformers.utils import logging as library

        library.set_verbosity(self._level)
