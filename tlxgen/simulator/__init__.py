"""A CPU simulator of Triton/TLX kernels: finds deadlocks, races and wrong results before a kernel is launched.

Where to look:

- `check`: runs a kernel on small problems under several schedules; `verdicts` stores the outcome for the tuner.
- `findings`: the kinds of finding and their remedies.
- `program`: loads a kernel's file and launches its kernels; `language.transform` rewrites them to Python.
- `machine.machine`: the scheduler; `machine.tasks`: roles, CTAs, clusters and asynchronous queues.
- `machine.barriers`: mbarriers and named barriers. `machine.deadlock`: the report when no role can continue.
- `machine.races`: races and missing fences in `machine.shared_memory` and `machine.global_memory`, found by the vector
  clocks of `machine.clocks`. `machine.exit_checks`: work without a wait. `machine.timeline`: Chrome traces.
- `language.namespace`: `tl`, which computes on `language.blocks`; `language.descriptors`: TMA boxes;
  `language.assembly`: meanings of inline assembly. `dtypes`: Triton's dtypes in numpy.
- `tlx.namespace`: `tlx`, with `tlx.copies`, `tlx.allocation`, `tlx.wgmma` and `tlx.warp_groups`.
"""
