"""Benchmarks: the measurements that the project's claims rest on.

Each script is run as `python -m benchmarks.<name>` from the project's folder; `--help` says what it measures, how long
it takes and what it writes. Results go to `benchmarks/results/<date>-<name>-<gpu>.json` with GPU, driver, versions and
protocol, and are committed. `benchmarks/suites` lists the shapes.

| script | measures | GPU |
|---|---|---|
| `suite` | tuned and default kernels of a suite against the libraries | yes |
| `nearest` | neighbours' configs and defaults off the suites, against fresh tuning | yes |
| `moe` | a mixture-of-experts layer and its parts against torch | yes |
| `varlen` | packed sequences against the same work in a batch | yes |
| `overhead` | host time of a call, beside torch's | yes |
| `cold_start` | first call of a process, beside the library's | yes |
| `simulator` | speed of the simulator | no |
| `structures` | whether every structure of the kernels is clean in the simulator | no |
| `report` | nothing: writes the README's table from the newest results | no |

Shared: `harness` (options, gate, results files), `replays` (times of any calls), `untuned` (problems without a row).
"""
