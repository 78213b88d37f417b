"""Kernels for the problems of `manifest.json`, and torch for all others. Needs torch, and triton where kernels run.

The functions take tensors of any device, strides and sizes, and compute with torch what no kernel of this package is
for: other problems, other GPUs, other strides or alignment, and calls whose effects a kernel launch would miss:
gradients (forward mode too), functorch transforms, tracing, dispatch modes, autocast to another dtype, negated views,
tensor subclasses. `explain` tells which.
"""
