"""What stands in for `triton.language` while a kernel is simulated."""
