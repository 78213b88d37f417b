"""The tuner: searches a problem's candidates on a GPU, times them against the library, and stores the fastest.

- `tune`: one tuning run. Every refused candidate passes `_Run._failed`, which counts and stores it.
- `search`: which candidates to try next. `rank`: the same without a GPU, by the time model.
- `compile_pool`: compilation and simulation, with the compilers' timeout.
- `runner`: gate and timing in a child process, with the kernels' timeout; `measure` holds the code that the child runs.
- `process`: the child process; `Child.call` kills it at a timeout.
- `timing`: times relative to the library's in the same rounds, and signs that another process used the GPU.
- `final`: the choice of the winner.
- `gpu_lock`: one tuner per GPU. `nvml`: questions to the driver. `on_miss`: tuning from a running program.
"""
