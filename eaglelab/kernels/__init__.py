"""Faster implementations of single operations, each beside the PyTorch one that it must agree with."""

from eaglelab.kernels.selection import KERNEL_CHOICES, Kernel, KernelChoice, kernels

__all__ = ["KERNEL_CHOICES", "Kernel", "KernelChoice", "kernels"]
