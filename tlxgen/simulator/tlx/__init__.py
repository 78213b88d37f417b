"""What stands in for `triton.language.extra.tlx` while a kernel is simulated."""
