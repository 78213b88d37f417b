"""The simulated `triton.language`: blocks of values in numpy, global memory, and the rewriting of kernels to Python."""
