"""A target of which no process reads more than its share: for targets larger than a host's memory.

The library reads a checkpoint straight into FSDP2's shards: slices of safetensors files, its own conversions of names
and experts included. It shards embedding, head and norm as well, which losses use outside of any forward pass; those
are put together again.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from eaglelab import assets
from eaglelab.target import loading
from eaglelab.target.decoder import find_wiring, use_exact_attention
from eaglelab.target.fingerprint import stored_weights
from eaglelab.target.frozen import FrozenTarget
from eaglelab.target.head_only import CannotStandAlone, HeadOnlyTarget, quiet

log = logging.getLogger(__name__)


class ShardedTarget(HeadOnlyTarget):
    """Embedding, head and identity of a target at once; its layers when :meth:`shard` is called."""

    _settings: dict[str, Any]
    _layer_rule: str

    @classmethod
    def load(cls, source: str | Path, **options: Any) -> FrozenTarget:  # type: ignore[override]
        """Load what is needed before there are processes to share with; arguments as for :meth:`FrozenTarget.load`.

        Returns:
            A target to :meth:`shard`: of this class, or, where its checkpoint cannot be read in shares, a whole one;
            the reason is logged.

        Raises:
            ValueError: as :meth:`FrozenTarget.load`.
        """
        where = assets.bundled_target() if source == "bundled" else source
        settings = {**loading.DEFAULTS, **options}
        try:
            if settings["gguf_file"] is not None or Path(where).suffix == ".gguf":
                raise _UnreadableError("a GGUF file is unpacked as a whole")
            target, config = cls._with_one_layer(where, settings)
            place = target.checkpoint_files
            assert place is not None and place.folder is not None
            _require_shares(config, place.folder)
        except (*CannotStandAlone, _UnreadableError) as error:
            log.warning("every process reads the whole target %s into its memory first: %s", source, error)
            return FrozenTarget.load(source, **options)
        target.source = "bundled" if source == "bundled" else place.source
        target._settings = settings | {"source": where}
        target._layer_rule = _layer_rule(target)
        target._drop_layers(config)
        return target

    def _shard_layers(self, device: torch.device) -> None:
        if self.num_layers == len(self._wiring.layers):
            return
        del self.model, self._wiring  # embedding and head come again, and need not be there twice
        # where the library puts the shards: on a CPU, too, with a build for GPUs on a machine that has none
        own = torch.accelerator.current_accelerator(check_available=True)
        if device.type == (own.type if own is not None else "cpu"):
            self._take(self._read_shares(device))
            return
        log.warning("every process reads the whole target into its memory first: shares are not read on %s", device)
        self._take(loading.load(**self._settings | {"device": "cpu"})[0])
        super()._shard_layers(device)

    def _read_shares(self, device: torch.device) -> Any:
        from transformers.distributed import DistributedConfig

        processes = torch.distributed.get_world_size()
        shares = DistributedConfig(fsdp_size=processes, fsdp_plan={self._layer_rule: "free_full_weight"})
        with quiet():
            settings = self._settings | {"device": device}
            model, _, _ = loading.load(**settings, extra={"distributed_config": shares})
        use_exact_attention(model)
        return _whole_outside_layers(model)

    def _take(self, model: Any) -> None:
        """Be the target of ``model``, checked as any other."""
        self._wrap(model)
        self._embed_scale, self._head_form = self._ask()

    def _require_layers(self) -> None:
        if not len(self._wiring.layers):
            raise ValueError("this target has no layers before it is sharded over its processes (trainer=fsdp)")


class _UnreadableError(Exception):
    """A checkpoint that the library does not read in shares."""


def _require_shares(config: Any, folder: Path) -> None:
    """Raises _UnreadableError where shares of a checkpoint cannot be read."""
    import transformers

    if getattr(config, "quantization_config", None) is not None:
        raise _UnreadableError("its weights are quantised")
    stored = stored_weights(folder)
    if stored is None or any(file.suffix != ".safetensors" for file in stored[0]):
        raise _UnreadableError("its weights are not in safetensors files, of which slices could be read")
    fields = getattr(getattr(transformers, "DistributedConfig", None), "__dataclass_fields__", {})
    if not {"fsdp_size", "fsdp_plan"} <= fields.keys():
        raise _UnreadableError(f"transformers {transformers.__version__} cannot do it; install a newer one")


def _layer_rule(target: FrozenTarget) -> str:
    """The library's name for all decoder layers, such as ``model.layers.*``."""
    first = next(name for name, module in target.model.named_modules() if module is target._wiring.layers[0])
    return f"{first.rpartition('.')[0]}.*"


def _whole_outside_layers(sharded: Any) -> Any:
    """The same model with plain parameters outside its decoder layers, which stay sharded; all processes together."""
    from torch.distributed.fsdp import FSDPModule

    config = copy.deepcopy(sharded.config)
    if hasattr(config, "distributed_config"):
        del config.distributed_config
    own_class = next(one for one in type(sharded).__mro__ if not issubclass(one, FSDPModule))
    with torch.device("meta"):
        model: Any = own_class(config)  # type: ignore[call-arg]
    layers = find_wiring(model).layers
    stack = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and list(m) == layers)
    for index, layer in enumerate(find_wiring(sharded).layers):
        stack[index] = layer
    inside = {module for layer in stack for module in layer.modules()}
    taken: dict[int, nn.Parameter] = {}  # tied ones once
    for name, module in model.named_modules():
        if module in inside:
            continue
        source = sharded.get_submodule(name)
        for key, parameter in source._parameters.items():
            if parameter is not None and id(parameter) not in taken:
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                taken[id(parameter)] = nn.Parameter(whole.detach(), requires_grad=False)
            module._parameters[key] = None if parameter is None else taken[id(parameter)]
        module._buffers.update(source._buffers)
    if hasattr(sharded, "generation_config"):
        model.generation_config = sharded.generation_config
    return model.eval()
