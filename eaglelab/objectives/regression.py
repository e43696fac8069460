"""Feature regression of EAGLE-1 and HASS.

Letters: M supervised rows, d hidden width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def smooth_l1(predicted_Md: Tensor, feature_Md: Tensor, *, beta: float = 1.0) -> Tensor:
    """SmoothL1 averaged over d, summed over rows, in fp32: a scalar (EAGLE paper, section 4; ``v_w`` term).

    The caller divides by the number of supervised rows, of all processes where there are several.
    """
    return F.smooth_l1_loss(predicted_Md.float(), feature_Md.float(), beta=beta, reduction="sum") / max(
        predicted_Md.shape[-1], 1
    )
