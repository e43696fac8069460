"""The three training losses written down literally: the baseline of ``eaglelab bench`` and an oracle of the tests.

As a reader of the papers would write them, and as the published trainers do it: logits of all rows and steps, a matrix
of all [R, R + s] scores, keys and values concatenated step by step, states shifted by one row, masks in place of plans.
No chunks, no plan of rows, no recomputation. One sequence layout only: each sequence one segment, without padding.

Letters: B sequences, R rows, H heads, G key/value heads, D head width, d hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglelab.drafters import DrafterConfig
from eaglelab.variants import DraftingModule, Eagle3Module, EagleModule, HassModule, View


def literal_loss(module: DraftingModule, view: View) -> Tensor:
    """The loss of a micro-batch, all passes and steps together; differentiable in the drafter's weights.

    Raises:
        ValueError: packed or padded rows, or a switch that is not written down here.
    """
    if not view.rows.causal or not bool(view.rows.legal_BR.all()):
        raise ValueError("the literal implementation takes one segment per sequence and no padding")
    if isinstance(module, Eagle3Module):
        return _eagle3(module, view)
    if isinstance(module, HassModule):
        return _hass(module, view)
    if isinstance(module, EagleModule):
        return _eagle(module, view)
    raise ValueError(f"nobody wrote {type(module).__name__} down literally")


class LiteralAttention:
    """Scores of every row against the keys of all rows, and of its own draft steps, in one matrix."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q_BHRD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor) -> Tensor:
        repeat, R, scale = q_BHRD.shape[1] // k_BGRD.shape[1], q_BHRD.shape[2], q_BHRD.shape[-1] ** -0.5
        self.keys.append(k_BGRD.repeat_interleave(repeat, 1))
        self.values.append(v_BGRD.repeat_interleave(repeat, 1))
        score = q_BHRD @ self.keys[0].mT * scale
        score = score + torch.full((R, R), -torch.inf, dtype=score.dtype, device=score.device).triu(1)
        for key_BHRD in self.keys[1:]:
            own = (q_BHRD * key_BHRD).sum(-1, keepdim=True) * scale
            score = torch.cat((score, own), dim=-1)
        weight = score.softmax(-1)
        out = weight[..., :R] @ self.values[0]
        for s, value_BHRD in enumerate(self.values[1:]):
            out = out + weight[..., R + s, None] * value_BHRD
        return out


def _eagle(module: EagleModule, view: View) -> Tensor:
    contract = module.contract
    _require(contract.labels == "soft", "labels")
    state_BRd = module.noisy(module.network.fuse(view.taps_BRF), view)
    predicted_BRd = module.network(state_BRd, view.embedding(), view.position(), LiteralAttention())
    return _feature_losses(module, predicted_BRd, view, 0, 0.0)


def _hass(module: HassModule, view: View) -> Tensor:
    contract = module.contract
    _require(contract.alignment == "masked", "alignment")
    _require(contract.detach, "detach")
    _require(not contract.renormalise_top_k, "renormalise_top_k")
    _require(not contract.eagle_share, "eagle_share")
    _require(contract.labels == "soft", "labels")
    network, loss = module.network, torch.zeros((), device=view.taps_BRF.device)
    states = [module.noisy(network.fuse(view.taps_BRF), view)]
    for step, weight in enumerate(module.weights):
        attention = LiteralAttention()
        for earlier, state_BRd in enumerate(states[:-1]):
            k, v = network.keys(state_BRd, view.embedding(earlier), view.position(earlier))
            attention.keys.append(k.repeat_interleave(_repeat(network.config), 1))
            attention.values.append(v.repeat_interleave(_repeat(network.config), 1))
        predicted_BRd = network(states[-1], view.embedding(step), view.position(step), attention)
        loss = loss + weight * _feature_losses(module, predicted_BRd, view, step, contract.top_weight)
        states.append(predicted_BRd.detach())
    return loss


def _feature_losses(module: EagleModule, predicted_BRd: Tensor, view: View, step: int, top_weight: float) -> Tensor:
    contract, head = module.contract, view.target.lm_head
    mask_BR = view.rows.supervised_at(step).float()
    count = mask_BR.sum().clamp(min=1)
    teacher_BRd = view.teacher(step)
    with torch.no_grad():
        q_BRV = head(teacher_BRd).float().softmax(-1)
    log_p_BRV = head(predicted_BRd).float().log_softmax(-1)
    distillation = -(mask_BR * (q_BRV * log_p_BRV).sum(-1)).sum() / count
    distance_BRd = F.smooth_l1_loss(predicted_BRd, teacher_BRd, beta=contract.smooth_l1_beta, reduction="none")
    regression = (mask_BR * distance_BRd.mean(-1)).sum() / count
    loss = contract.regression_weight * regression + contract.distillation_weight * distillation
    if top_weight:
        assert isinstance(module, HassModule)
        q_BRK, id_BRK = q_BRV.topk(module.contract.top_k, dim=-1)
        top = -(mask_BR * (q_BRK * log_p_BRV.gather(-1, id_BRK)).sum(-1)).sum() / count
        loss = loss + top_weight * top
    return loss


def _eagle3(module: Eagle3Module, view: View) -> Tensor:
    contract = module.contract
    _require(contract.reduction == "masked", "reduction")
    _require(not contract.detach, "detach")
    _require(not contract.feature_weight, "feature_weight")
    network, ids_K = module.network, module.network.ids_K
    with torch.no_grad():
        target_BRV = view.target.lm_head(view.teacher())
        best_BR = target_BRV.argmax(-1)
        drafted_BRK = target_BRV if ids_K is None else target_BRV[..., ids_K]
        inside_BR = torch.ones_like(best_BR, dtype=torch.bool) if ids_K is None else torch.isin(best_BR, ids_K)
        q_BRK = drafted_BRK.float().softmax(-1)
    state_BRd, attention = network.fuse(view.taps_BRF), LiteralAttention()
    loss = torch.zeros((), device=state_BRd.device)
    for step in range(contract.steps):
        state_BRd = network(state_BRd, view.embedding(step), view.position(step), attention)
        log_p_BRK = network.logits(state_BRd, view.target.lm_head).float().log_softmax(-1)
        mask_BR = (view.rows.supervised_at(step) & _shifted(inside_BR, step)).float()
        row_BR = -(_shifted(q_BRK, step) * log_p_BRK).sum(-1)
        loss = loss + contract.decay**step * (mask_BR * row_BR).sum() / mask_BR.sum().clamp(min=1)
    return loss


def _shifted(x_BR: Tensor, step: int) -> Tensor:
    """What row ``r + step`` says, at row ``r``; zero where there is none."""
    return torch.cat((x_BR[:, step:], torch.zeros_like(x_BR[:, :step])), dim=1)


def _repeat(config: DrafterConfig) -> int:
    return config.num_attention_heads // config.num_key_value_heads


def _require(as_written: bool, switch: str) -> None:
    if not as_written:
        raise ValueError(f"the literal implementation knows no other variant.{switch} than the default")
