"""Scaled dot-product attention, forward: problem, operator, time model, and what torch and other libraries offer."""
