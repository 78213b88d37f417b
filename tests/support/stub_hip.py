"""A HIP driver that computes nothing and prints each launch: what Triton's launcher for AMD hands over, on no GPU.

As `stub_cuda`, run as a script with an operator's name, a folder and an architecture, such as `gfx942`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

FUNCTION = 0xF0
#: Bytes of shared memory that one workgroup of AMD's may have (LDS; CDNA 3 and CDNA 4 ISA documents).
LDS = {"gfx942": 64 << 10, "gfx950": 160 << 10}

#: The functions of the driver that Triton asks for, by name.
SOURCE = """
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
int hipDriverGetVersion(int *out) { *out = 70000000; return 0; }
const char *hipGetLastError(void) { return ""; }
const char *hipGetErrorString(int error) { return "an error"; }
int hipGetDeviceProperties(void *out, int device) { return 1; }
int hipModuleLoadDataEx(void **out, const void *image, unsigned n, void *options, void **values) {
  *out = (void *)1;
  return ((const char *)image)[1] == 'E' ? 0 : 1; /* an ELF file */
}
int hipModuleUnload(void *module) { return 0; }
int hipModuleGetFunction(void **out, void *module, const char *name) { *out = (void *)FUNCTION; return 0; }
int hipFuncGetAttribute(int *out, int which, void *function) { *out = which == 0 ? 1024 : 0; return 0; }
int hipDrvLaunchKernelEx(void *config, void *function, void **params, void **extra) { return 1; }
int hipModuleLaunchCooperativeKernel(void) { return 1; }
int hipPointerGetAttribute(void *out, int which, void *address) { *(void **)out = address; return 0; }
int hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned one,
                          unsigned two, unsigned shared, void *stream, void **params, void **extra) {
  printf("launch %u %u %u %u %u %p %p", x, y, z, threads, shared, stream, function);
  for (int i = 0; i < PARAMS; ++i) printf(" %016llx", *(unsigned long long *)params[i]);
  printf("\\n");
  fflush(stdout);
  return 0;
}
int hipGetProcAddress(const char *name, void **out, int version, uint64_t flags, void *status) {
  *out = dlsym(dlopen(PATH, RTLD_NOW), name);
  return *out ? 0 : 1;
}
"""


def build(folder: Path, params: int) -> None:
    """Makes `libamdhip64.so`, which prints as many kernel parameters."""
    (folder / "hip.c").write_text(SOURCE)
    library = folder / "libamdhip64.so"
    options = [f"-DFUNCTION={FUNCTION:#x}", f"-DPARAMS={params}", f'-DPATH="{library}"']
    subprocess.run(["cc", "-w", "-shared", "-fPIC", *options, str(folder / "hip.c"), "-o", str(library)], check=True)


def main(name: str, folder: Path, architecture: str) -> None:
    """See above."""
    os.environ["TRITON_LIBHIP_PATH"] = str(folder / "libamdhip64.so")
    from triton.backends.amd import driver as amd
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from tests.support import stub_cuda
    from tlxgen import devices, ops
    from tlxgen.codegen import loader
    from tlxgen.codegen.compile import compile_kernel
    from tlxgen.codegen.emit import emit
    from tlxgen.runtime import launch
    from tlxgen.space.candidates import vanilla_config

    described = SimpleNamespace(
        name="AMD Instinct", multi_processor_count=304, L2_cache_size=4 << 20, gcnArchName=f"{architecture}:xnack-"
    )
    gpu = devices._described(described, devices.AMD[architecture], architecture)
    operator = ops.get(name)
    problem = operator.problem(stub_cuda.PROBLEMS[name])
    config = vanilla_config(problem, gpu)
    assert config is not None
    module = loader.load(emit(operator, problem, config))
    inputs = operator.inputs(problem, "cpu", 0)
    grid, args = operator.arguments(module, inputs, operator.output(problem, inputs), num_sms=gpu.sm_count)
    compiled = compile_kernel(module, args, gpu.target)
    given = [
        (kind, arg.data_ptr() if hasattr(arg, "data_ptr") else arg)
        for kind, arg in zip(compiled.src.signature.values(), args, strict=False)
        if kind != "constexpr"
    ]
    build(folder, len(given))

    there = SimpleNamespace(launcher_cls=amd.HIPLauncher, get_current_device=lambda: 0)
    there.get_current_target = lambda: GPUTarget("hip", architecture, 64)
    there.allocate_default_profile_scratch = lambda *_: None
    driver.set_active(there)
    utils = amd.HIPUtils()
    utils.get_device_properties = lambda _: {"max_shared_mem": LDS[architecture]}
    there.utils = utils

    made = launch.Launcher(module, args, gpu.target)
    made(grid, stub_cuda.STREAM, args)
    threads = 64 * int(config.params["num_warps"])
    told = {"grid": grid, "given": given, "dispatched": made.slim, "threads": threads}
    sys.stdout.write(json.dumps({**told, "shared": compiled.metadata.shared}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
