"""The tensors of a published drafter, each checked by name, shape, type and content.

Letters: d hidden width, V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eaglelab.drafters import DrafterConfig, DraftNetwork
from eaglelab.formats import layouts
from eaglelab.formats.exporting import embedding_table, shares_embedding
from eaglelab.formats.files import Checkpoint
from eaglelab.formats.layouts import EMBEDDING, FC_BIAS, MAPS
from eaglelab.target import FrozenTarget


def network_weights(
    files: Checkpoint, tensors: dict[str, Tensor], network: DraftNetwork, kind: str
) -> dict[str, Tensor]:
    """The network's state from the file's tensors, by name and shape; floating ones in fp32."""
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    identity = network.config.draft_vocab_size is None and kind != "eagle"
    if identity:
        tensors = _without_identity_maps(tensors, network.config.vocab_size)

    def shown(names: set[str]) -> str:
        nested = any(name.startswith("layers.0.") for name in files.tensors)
        found = [layouts.file_name(name, nested) for name in sorted(names)]
        return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")

    if missing := set(expected) - set(tensors):
        hint = ""
        if "lm_head.weight" in missing:
            hint = "; an EAGLE-3 drafter brings its own head, it is not the target's"
        elif FC_BIAS in missing:
            hint = "; if it was trained without one, write bias: false into config.json"
        elif missing & set(MAPS):
            hint = "; a head over a draft vocabulary is useless without the map that it was trained with"
        raise ValueError(f"{files.source} lacks {shown(missing)}{hint}")
    if extra := set(tensors) - set(expected):
        hint = "; if it was trained with one, write bias: true into config.json" if FC_BIAS in extra else ""
        raise ValueError(f"{files.source} holds {shown(extra)}, which a drafter of format={kind} does not have{hint}")
    weights = {}
    for name in expected:
        value = tensors[name]
        if tuple(value.shape) != expected[name]:
            raise ValueError(
                f"{files.source}: {shown({name})} has shape {tuple(value.shape)}, config.json asks for "
                f"{expected[name]}{_shape_hint(name, value, network.config)}"
            )
        weights[name] = _plain_tensor(files.source, shown({name}), name, value)
    return weights


def _shape_hint(name: str, value: Tensor, config: DrafterConfig) -> str:
    if name == "fc.weight" and value.dim() == 2:
        columns = value.shape[1] / config.hidden_size
        if columns == 3 and config.num_taps == 1:
            return "; it fuses three streams as EAGLE-3 does, so this is no EAGLE-1 file: check config.json"
        if columns == 2 and config.num_taps > 1:
            return "; it fuses embedding and feature as EAGLE-1 does, so this is no EAGLE-3 file: check config.json"
    return ""


def _plain_tensor(source: str, shown: str, name: str, value: Tensor) -> Tensor:
    if name in MAPS:
        if value.is_floating_point() or value.is_complex():
            raise ValueError(f"{source}: {shown} is {value.dtype}; a vocabulary map holds whole numbers")
        return value.to(torch.bool if name == "t2d" else torch.int64)
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{source}: {shown} is {value.dtype}; quantised drafters cannot be read, give the full one")
    value = value.float()
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{source}: {shown} holds NaN or infinite values; the file is broken, get it again")
    return value.contiguous()


def _without_identity_maps(tensors: dict[str, Tensor], V: int) -> dict[str, Tensor]:
    """A whole vocabulary needs no maps; some writers store them all the same."""
    d2t, t2d = (tensors.get(name) for name in MAPS)
    if (d2t is not None and (d2t.shape != (V,) or bool(d2t.any()))) or (t2d is not None and not bool(t2d.all())):
        raise ValueError(
            "d2t or t2d leaves tokens out, but config.json says that the draft vocabulary is the target's; correct "
            "draft_vocab_size"
        )
    return {name: value for name, value in tensors.items() if name not in MAPS}


def check_maps(weights: dict[str, Tensor], config: DrafterConfig) -> None:
    """``nonzero(t2d)`` must be ``arange(K) + d2t``."""
    if config.draft_vocab_size is None:
        return
    d2t_K, inside_K = weights["d2t"], weights["t2d"].nonzero().flatten()
    index_K = torch.arange(config.draft_vocab_size)
    if inside_K.equal(index_K + d2t_K):
        return
    if inside_K.equal(d2t_K):
        raise ValueError(
            "d2t holds absolute target ids where the formats store offsets, so every draft token would be another one; "
            "subtract arange(draft_vocab_size) from it in the file"
        )
    raise ValueError(
        "d2t and t2d disagree: nonzero(t2d) is not arange(draft_vocab_size) + d2t. One of them belongs to another "
        "head; get both maps that were trained with this one"
    )


def check_embedding(embedding: Tensor | None, target: FrozenTarget, trusted: tuple[str, ...]) -> str:
    """Compare the file's embedding with the target's; a drafter here always reads the target's."""
    table_Vd = embedding_table(target).float()
    if embedding is None:
        if not shares_embedding(target, table_Vd.to(target.dtype)) and "embedding" not in trusted:
            raise ValueError(
                f"target {target.source} scales its embedding and the drafter's file has none, so it is open which one "
                "it was trained with; say trust=embedding if it was the scaled one"
            )
        return "embedding: none in the file, the target's is used"
    if embedding.shape != table_Vd.shape:
        raise ValueError(
            f"{EMBEDDING} has shape {tuple(embedding.shape)}, the target's embedding {tuple(table_Vd.shape)}. Give the "
            "target that it was trained for"
        )
    difference_Vd = (embedding.float() - table_Vd).abs()
    rounding_Vd = 2**-8 * table_Vd.abs() + 1e-7  # either side may have been stored as bfloat16 or float16
    off = int((difference_Vd > rounding_Vd).any(-1).sum())
    if not off and bool(torch.isfinite(difference_Vd).all()):
        return "embedding: equal to the target's" + (", to rounding" if bool(difference_Vd.any()) else "")
    told = (
        f"{off} of {len(table_Vd)} rows of {EMBEDDING} differ from the target's (by up to "
        f"{float(difference_Vd.max()):.2g})"
    )
    if "embedding" not in trusted:
        raise ValueError(
            f"{told}: it was trained with another target or embedding. Give that target, or say trust=embedding to go "
            "on with this target's embedding"
        )
    return f"embedding: {told}; the target's is used, as trust=embedding said"
