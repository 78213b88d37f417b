"""Attention over packed sequences of different lengths, forward: problem, operator, and torch as its reference."""
