"""Kernels for the problems of `manifest.json`, and torch for all others. Needs torch, and triton where kernels run.

The functions take tensors of any device, strides and sizes, and compute with torch what no kernel of this package is
for: other problems, other GPUs, tensors that lie otherwise in memory, and whatever a kernel's launch would not be seen
by or not know of: gradients, forward ones too, functorch, traces and modes, autocast to another dtype, negated views,
subclasses of tensors. `explain` tells which.
"""

from .attention import attention
from .dispatch import entries, explain
from .gemm import gemm
from .grouped_gemm import grouped_gemm
from .vector_add import vector_add

__all__ = ["attention", "entries", "explain", "gemm", "grouped_gemm", "vector_add"]
