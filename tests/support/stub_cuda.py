"""A stand-in CUDA driver that prints each launch instead of running it, to test Triton's launchers without a GPU.

Run as a script with an operator's name and a folder, it launches that operator's plain Triton kernel through
`tlxgen.runtime.launch`. The driver prints what it received, the script what it passed: grid, and each argument with its
type. A third word, `ordinary`, means that there is no dispatcher.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: Any address will do for what the launchers only pass on.
STREAM = 0x57
FUNCTION = 0xF0

#: The functions of the driver that Triton calls. Of each kernel parameter eight bytes are printed, of which those count
#: that its type has: all parameters lie on the stack, where there are as many behind the last.
SOURCE = """
#include <stdint.h>
#include <stdio.h>
typedef struct { unsigned grid[3], block[3], shared; void *stream; void *attributes; unsigned count; } Config;
static int one(void **out) { *out = (void *)1; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *out) { *out = 13000; return 0; }
int cuDeviceGet(int *out, int device) { *out = device; return 0; }
int cuDeviceGetAttribute(int *out, int which, int device) { *out = 232448; return 0; }
int cuDevicePrimaryCtxRetain(void **out, int device) { return one(out); }
int cuCtxGetCurrent(void **out) { return one(out); }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *out) { *out = 0; return 0; }
int cuModuleLoadData(void **out, const void *image) { return one(out); }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **out, void *module, const char *name) { *out = (void *)FUNCTION; return 0; }
int cuFuncGetAttribute(int *out, int which, void *function) { *out = which == 0 ? 1024 : 0; return 0; }
int cuFuncSetAttribute(void *function, int which, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int value) { return 0; }
int cuGetErrorString(int error, const char **out) { *out = "an error"; return 0; }
int cuPointerGetAttribute(uint64_t *out, int which, uint64_t address) { *out = address; return 0; }
int cuPointerGetAttributes(unsigned n, int *which, uint64_t **out, uint64_t at) { *out[0] = at; return 0; }
int cuStreamIsCapturing(void *stream, int *out) { *out = 0; return 0; }
int cuCtxGetLimit(size_t *out, int which) { *out = 0; return 0; }
int cuCtxSetLimit(int which, size_t value) { return 0; }
int cuOccupancyMaxActiveClusters(int *out, void *function, const Config *config) { *out = 1; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
  printf("launch %u %u %u %p %p", config->grid[0], config->grid[1], config->grid[2], config->stream, function);
  for (int i = 0; i < PARAMS; ++i) printf(" %016llx", *(unsigned long long *)params[i]);
  printf("\\n");
  fflush(stdout);
  return 0;
}
"""

PROBLEMS: dict[str, dict[str, Any]] = {
    "gemm": {"M": 64, "N": 96, "K": 128},
    "grouped_gemm": {"E": 4, "ROWS": 64, "N": 32, "K": 48},
    "attention": {"B": 1, "H": 2, "S": 64, "D": 64},
    "attention_varlen": {"B": 2, "H": 2, "total_q": 64, "D": 64},
    "vector_add": {"n": 4096},
}

_FORMATS = {"i1": "<?", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "fp32": "<f", "fp64": "<d"}


def build(folder: Path, params: int) -> None:
    """Makes `libcuda.so.1`, which prints as many kernel parameters, and loads it, so that its name is known."""
    (folder / "cuda.c").write_text(SOURCE)
    library = folder / "libcuda.so.1"
    options = [f"-DFUNCTION={FUNCTION:#x}", f"-DPARAMS={params}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", "-w", "-shared", "-fPIC", *options, str(folder / "cuda.c"), "-o", str(library)], check=True)
    (folder / "libcuda.so").symlink_to(library)  # as the linker asks for it
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def value(kind: str, raw: str) -> Any:
    """What a parameter of this type in Triton's signature is, of the eight bytes at its place."""
    data = int(raw, 16).to_bytes(8, "little")
    form = "<Q" if kind.startswith("*") else _FORMATS[kind]
    return struct.unpack(form, data[: struct.calcsize(form)])[0]


def main(name: str, folder: Path, *words: str) -> None:
    """See above."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    from tlxgen import ops
    from tlxgen.codegen import loader
    from tlxgen.codegen.compile import compile_kernel
    from tlxgen.codegen.emit import emit
    from tlxgen.devices import target
    from tlxgen.runtime import launch
    from tlxgen.space.candidates import vanilla_config

    gpu, operator = target("h200"), ops.get(name)
    problem = operator.problem(PROBLEMS[name])
    config = vanilla_config(problem, gpu)
    assert config is not None
    module = loader.load(emit(operator, problem, config))
    inputs = operator.inputs(problem, "cpu", 0)
    grid, args = operator.arguments(module, inputs, operator.output(problem, inputs), num_sms=gpu.sm_count)
    kinds = compile_kernel(module, args, gpu.capability).src.signature.values()
    given = [
        (kind, arg.data_ptr() if hasattr(arg, "data_ptr") else arg)
        for kind, arg in zip(kinds, args, strict=False)
        if kind != "constexpr"
    ]
    build(folder, len(given))

    there = SimpleNamespace(launcher_cls=nvidia.CudaLauncher, get_current_device=lambda: 0)
    there.get_current_target = lambda: SimpleNamespace(warp_size=32, backend="cuda", arch=90)
    driver.set_active(there)
    there.utils = nvidia.CudaUtils()

    if "ordinary" in words:
        vars(launch).update(_dispatcher=lambda _: (None, None))
    made = launch.Launcher(module, args, gpu.capability)
    made(grid, STREAM, args)
    sys.stdout.write(json.dumps({"grid": grid, "given": given, "dispatched": made.slim}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
