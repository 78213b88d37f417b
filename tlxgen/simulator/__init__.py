"""A CPU simulator of Triton/TLX kernels: what a kernel computes, and the mistakes that hardware does not report."""
