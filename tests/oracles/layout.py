"""Layouts of packed and padded rows for tests."""

import torch


def packed(lengths_by_sequence, S: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """valid, segment and position [B, S] of segments with the given lengths, right-padded to S tokens."""
    B = len(lengths_by_sequence)
    valid = torch.zeros(B, S, dtype=torch.bool)
    segment = torch.full((B, S), -1)
    position = torch.zeros(B, S, dtype=torch.long)
    for b, lengths in enumerate(lengths_by_sequence):
        start = 0
        for i, n in enumerate(lengths):
            valid[b, start : start + n] = True
            segment[b, start : start + n] = i
            position[b, start : start + n] = torch.arange(n)
            start += n
    return valid, segment, position
