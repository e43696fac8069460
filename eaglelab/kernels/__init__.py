"""Faster ways to run the same operations: kernels beside PyTorch's own, and recorded calls."""

from eaglelab.kernels.selection import KERNEL_CHOICES, Kernel, KernelChoice, kernels

__all__ = ["KERNEL_CHOICES", "Kernel", "KernelChoice", "kernels"]
