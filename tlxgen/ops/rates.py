"""Rates of Hopper that were measured once, and that the operators' time models share.

A time model (`ops/<operator>/time_model.py`) predicts the microseconds of a config from a handful of terms: rounds of
tiles over the multiprocessors (wave quantisation), the tensor cores' rate by tile shape, shared-memory and L2 traffic,
bytes in flight (pipeline depth), fill and drain of the pipeline, and the roofline's bytes. It ranks candidates; its
microseconds are never stored as measured.
"""

from __future__ import annotations

#: Changes whenever predicted times do.
VERSION = "model-4"

# Fitted to every legal config of nine shapes on an H200 (benchmarks/results/2026-11-29-exhaustive-gemm-h200.json).
SUSTAINED = 0.70  # of the datasheet's rate, under the power limit on random data
BANDWIDTH = 0.87  # of the datasheet's, measured by copies
LAUNCH_US = 1.4  # a kernel between two others in a graph
FILL_US = 0.8  # first TMA bytes to first product
LATENCY_US = 1.5  # from asking for a stage to having it, under load
L2_BYTES_PER_CLOCK = 58  # from L2 to one multiprocessor
STORE_BYTES_PER_CLOCK = 128  # registers through shared memory towards L2, one multiprocessor
EXPOSED = 0.1  # of the shorter of arithmetic and memory traffic, what the longer does not hide; not measured
