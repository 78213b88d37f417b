"""The simulated `triton.language.extra.tlx`: tasks, barriers, shared memory, copies and wgmma."""
