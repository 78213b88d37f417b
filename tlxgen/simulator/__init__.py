"""A CPU simulator of Triton/TLX kernels: what a kernel computes, and the mistakes that hardware does not report.

To be read in this order:

- `check` runs a kernel on small problems under several schedules; `verdicts` remembers the outcome; `findings` are it.
- `program` loads a kernel's file, which `transform` has rewritten, and launches its kernels on a machine.
- `machine` lets the `tasks` of a grid take turns, and copies finish; `deadlock` explains why nobody can go on,
  `exit_checks` what is left when somebody ends, `timeline` shows what happened when.
- `clocks` say who knows what to be finished. All findings about order rest on them: `accesses` (races in
  `shared_memory` and `global_memory`) and `barriers`.
- `language` stands in for `triton.language`, on `blocks` of values: `dtypes`, `arithmetic`, `shapes`, `mathematics`,
  `reductions`, `tensor_cores`, `assembly` (`meanings` has that of our own templates); `global_operations` is what it
  asks of the machine.
- `tlx_namespace` stands in for TLX, with `tlx_copies` and `tlx_allocation`; `descriptors`, `wgmma` and `warp_groups`
  are what it gives to kernels.
"""
