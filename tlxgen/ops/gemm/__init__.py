"""Matrix product with fused epilogues: problem, operator, time model."""
