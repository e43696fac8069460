"""Keep other libraries' notices out of a user's terminal."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Drop library notices that a user cannot act on; warnings of this project stay."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("datasets.packaged_modules.parquet.parquet").setLevel(logging.CRITICAL)  # it raises as well
    for pattern in (
        r".*does not have many workers.*",
        r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
        r".*GPU available but not used.*",
        r".*Total length of `list` across ranks is zero.*",  # a training without validation
        r".*exists and is not empty.*",  # a resumed run
        r".*recommended to use `self.log\(.*sync_dist=True.*",  # what is logged is summed over processes already
        r".*You have overridden `.*` in `LightningModule` but.*",  # it is meant to plan and move batches
        r".*Cannot dispatch to fused implementation.*",  # norms keep fp32 weights in mixed precision
    ):
        warnings.filterwarnings("ignore", message=pattern)
