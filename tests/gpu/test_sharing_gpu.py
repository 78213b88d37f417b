"""Any length, captured graphs, compiled models, other devices and exported packages, on the card."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tlxgen import api, devices, ops
from tlxgen.errors import LaunchError, TuningError
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime import plans
from tlxgen.runtime.pinning import pin
from tlxgen.space.candidates import candidates

torch = pytest.importorskip("torch")

LENGTHS = random.Random(0).choices(range(1, 2049), k=60)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", runtime.FallbackWarning)
        yield


def normal(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def far(result: Any, exact: Any) -> float:
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def decoding(keys: int) -> Any:
    sizes = (2, 8, 1, 128)
    return api.get_kernel("attention", sizes, kv_heads=2, kv_len=keys, causal="bottom-right", on_miss="ignore")


def reference(q: Any, k: Any, v: Any) -> Any:
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.softmax(q.double() @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def test_random_lengths_are_right_and_load_a_handful_of_binaries() -> None:
    runtime.forget()
    b = normal(512, 256).T
    for rows in LENGTHS:
        a = normal(rows, 256)
        kernel = api.get_kernel("gemm", (rows, 512, 256), layout="nt", on_miss="ignore")
        assert far(kernel(a, b), a.double() @ b.double()) < 4e-3, kernel.explain()
    assert len(plans.LOADED) <= 16


def test_a_growing_cache_of_keys_is_right_and_loads_one_binary() -> None:
    runtime.forget()
    cache = normal(2, 2, 2, 2048, 128)
    q = normal(2, 8, 1, 128)
    for keys in range(1030, 1070):  # of one size class
        k, v = cache[0, :, :, :keys], cache[1, :, :, :keys]
        assert far(decoding(keys)(q, k, v), reference(q, k, v)) < 1e-2
    assert len(plans.LOADED) == 1


def test_a_length_that_never_ran_is_captured_if_its_binary_is_loaded() -> None:
    cache, q = normal(2, 2, 2, 2048, 128), normal(2, 8, 1, 128)
    out = torch.empty_like(q)
    decoding(1500)(q, cache[0, :, :, :1500], cache[1, :, :, :1500], out=out)
    k, v = cache[0, :, :, :1501], cache[1, :, :, :1501]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoding(1501)(q, k, v, out=out)
    q.copy_(normal(2, 8, 1, 128))
    graph.replay()
    assert far(out, reference(q, k, v)) < 1e-2


def test_a_pinned_config_computes() -> None:
    gpu = devices.detect()
    assert gpu is not None
    problem = ops.get("gemm").problem((512, 384, 320))
    a, b = normal(512, 320), normal(320, 384)
    for config in candidates(problem, gpu)[::40]:
        with pin("gemm", config):
            kernel = api.get_kernel("gemm", problem)
        assert (kernel.origin, kernel.config) == ("pinned", config)
        assert far(kernel(a, b), a.double() @ b.double()) < 4e-3, config.short


def test_configs_one_after_the_other_keep_their_own_options() -> None:
    """Launch options of one config that reached the next would fail or give wrong numbers; so would a shared binary."""
    gpu = devices.detect()
    assert gpu is not None
    problem = ops.get("gemm").problem((512, 384, 320))
    a, b = normal(512, 320), normal(320, 384)
    configs = [candidates(problem, gpu, (template,))[0] for template in ops.get("gemm").templates]
    kernels = [api.get_kernel("gemm", problem, config=config) for config in configs]
    first = [kernel(a, b) for kernel in kernels]
    for _ in range(20):
        for kernel, expected in zip(kernels, first, strict=True):
            assert torch.equal(kernel(a, b), expected), kernel.explain()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_is_whole_right_and_runs_the_kernels(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tlxgen import functional as F  # noqa: N812 - as users import it

    launched: list[object] = []
    launch = plans.KernelPlan.launch

    def note(plan: plans.KernelPlan, *rest: Any) -> None:
        launched.append(plan)
        launch(plan, *rest)

    monkeypatch.setattr(plans.KernelPlan, "launch", note)
    weight, bias = normal(512, 256).requires_grad_(), normal(512).requires_grad_()

    def model(x: Any, linear: Callable[..., Any], attention: Callable[..., Any]) -> Any:
        q, k = linear(x, weight, bias).view(1, -1, 2, 4, 64).permute(2, 0, 3, 1, 4)
        return attention(q, k, k, is_causal=True)

    compiled = torch.compile(
        lambda x: model(x, F.linear, F.scaled_dot_product_attention),
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    for rows in (128, 192):
        x = normal(rows, 256).requires_grad_()
        one = compiled(x)
        other = model(x, torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention)
        assert far(one, other) < 2e-2
        found, expected = (torch.autograd.grad(y.float().square().sum(), (x, weight, bias)) for y in (one, other))
        assert all(far(a, b) < 5e-2 for a, b in zip(found, expected, strict=True))
    assert launched


def test_gradients_are_refused_and_inference_mode_works() -> None:
    kernel = api.get_kernel("gemm", (128, 128, 128))
    a, b = normal(128, 128).requires_grad_(), normal(128, 128)
    with pytest.raises(LaunchError, match="gradients"):
        kernel(a, b)
    with torch.inference_mode():
        assert far(kernel(a, b), a @ b) < 1e-2


def test_an_output_that_overlaps_an_operand_is_refused() -> None:
    parent = normal(192, 128)
    kernel = api.get_kernel("gemm", (128, 128, 128))
    with pytest.raises(LaunchError, match="overlaps"):
        kernel(parent[:128], normal(128, 128), out=parent[64:])
    before = parent.clone()
    wide = normal(128, 256)
    kernel(wide[:, :128], normal(128, 128), out=wide[:, 128:])  # columns apart are not
    assert torch.equal(parent, before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    with torch.cuda.device(1):
        kernel = api.get_kernel("gemm", (256, 256, 128))
    a, b = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda:1") for shape in ((256, 128), (128, 256)))
    with torch.cuda.device(0):
        result = kernel(a, b)
        assert torch.cuda.current_device() == 0
    assert result.device == a.device
    assert far(result, a.double() @ b.double()) < 4e-3


EXPORTED = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "tlxgen":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch, mine
for line in mine.entries():
    assert mine.explain(line["operator"], line["problem"]).startswith("kernels/"), line["label"]
a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
exact = a.double() @ b.double()
assert ((mine.gemm(a, b).double() - exact).norm() / exact.norm()) < 4e-3
q, k = torch.randn(1, 4, 256, 64, device="cuda").bfloat16(), torch.randn(1, 2, 256, 64, device="cuda").bfloat16()
library = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
ours = mine.attention(q, k, k, causal="bottom-right")
assert ((ours.double() - library.double()).norm() / library.double().norm()) < 1e-2
assert mine.dispatch._BROKEN == {}
assert sum(name.startswith("mine.kernels.") for name in sys.modules) == 2
"""


def test_an_exported_package_computes_without_tlxgen(tmp_path: Path) -> None:
    gpu = devices.detect()
    assert gpu is not None
    problems = [
        ops.get("gemm").problem((512, 512, 512)),
        ops.get("attention").problem((1, 4, 256, 64), kv_heads=2, causal="bottom-right"),
    ]
    importlib.import_module("tlxgen.export").write_package(tmp_path / "mine", problems, gpu)
    done = subprocess.run(
        [sys.executable, "-c", EXPORTED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


COLD = """
import time, torch
a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda"); torch.cuda.synchronize()
started = time.perf_counter()
import tlxgen
tlxgen.get_kernel("gemm", (4096, 4096, 4096))(a, a); torch.cuda.synchronize()
print(time.perf_counter() - started)
"""


def test_a_first_launch_in_a_new_process_takes_less_than_a_second() -> None:
    """Everything cached on disk; the number itself belongs into a benchmark."""
    seconds = [
        float(subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(seconds) < 1.0, seconds


SECOND_CALLS: list[tuple[str, Any, dict[str, Any]]] = [
    ("gemm", (256, 384, 320), {}),
    ("gemm", (256, 384, 320), {"layout": "nt", "epilogue": "bias"}),
    ("gemm", (256, 384, 320), {"epilogue": "scale+gelu+residual"}),
    ("attention", (2, 4, 256, 64), {"kv_heads": 2, "causal": "bottom-right", "lse": True}),
    ("attention", (2, 4, 256, 128), {}),
    ("attention", (2, 8, 1, 128), {"kv_heads": 2, "kv_len": 4096, "causal": "bottom-right"}),
    ("attention_varlen", (4, 4, 512, 64), {"kv_heads": 2, "causal": "bottom-right"}),
    ("vector_add", (10_000,), {}),
    ("grouped_gemm", (4, 512, 256, 128), {}),
    ("grouped_gemm", (4, 512, 256, 128), {"form": "gather"}),
    ("grouped_gemm", (4, 512, 256, 128), {"form": "2d2d"}),
]


def second_calls() -> Iterator[Any]:
    for name, shape, options in SECOND_CALLS:
        problem = ops.get(name).problem(shape, **options)
        for template in ops.get(name).templates:
            yield pytest.param(problem, template, id=f"{problem.label} {template}")


def served(problem: Any, template: str) -> Any:
    """A kernel of the template that was called until its launches are replayed."""
    gpu = devices.detect()
    assert gpu is not None
    try:
        config = candidates(problem, gpu, (template,))[0]
    except TuningError:
        pytest.skip("the template is not for the problem")
    kernel = api.get_kernel(problem.operator, problem, config=config)
    for _ in range(8):
        kernel(**ops.get(problem.operator).inputs(problem, "cuda", 0))
    return kernel


def checked(kernel: Any, inputs: dict[str, Any]) -> Any:
    """The result of a call whose arguments the emitted code makes."""
    out = ops.get(kernel.problem.operator).output(kernel.problem, inputs).zero_()
    kernel.plan({**kernel._defaults, **inputs}, out).launch({**kernel._defaults, **inputs}, out)
    return out


@pytest.mark.parametrize(("problem", "template"), list(second_calls()))
def test_second_calls_have_the_bits_of_first_ones(problem: Any, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors elsewhere, which a launch that was kept must read; addresses are not given back in between."""
    kernel, operator = served(problem, template), ops.get(problem.operator)
    fresh = [operator.inputs(problem, "cuda", seed) for seed in range(1, 4)]
    expected = [checked(kernel, inputs) for inputs in fresh]
    launched: list[object] = []
    launch = plans.KernelPlan.launch

    def note(*args: Any) -> None:
        launched.append(args)
        launch(*args)

    monkeypatch.setattr(plans.KernelPlan, "launch", note)
    for inputs, exact in zip(fresh, expected, strict=True):
        assert torch.equal(kernel(**inputs), exact)
        out = torch.full_like(exact, float("nan"))
        names = operator.inputs_in_order
        by_name = {name: value for name, value in inputs.items() if name not in names}
        for _ in range(8):
            out.fill_(float("nan"))
            assert torch.equal(kernel(*(inputs[name] for name in names), out=out, **by_name), exact)
    assert len(launched) <= 6  # the first of those with an output of the caller's


def test_second_calls_on_views_of_one_tensor() -> None:
    """Queries, keys and values as a projection leaves them, in an order that the first call did not have."""
    sizes = (2, 4, 256, 64)
    kernel = api.get_kernel("attention", sizes, on_miss="ignore")
    for turn in range(12):
        parts = normal(2, 256, 3, 4, 64).unbind(2)
        q, k, v = (parts[(turn + i) % 3].transpose(1, 2) for i in range(3))
        out = torch.empty_like(q)
        assert far(kernel(q, k, v, out=out), reference(q, k, v)) < 1e-2


@pytest.mark.parametrize("keys", [256, 4096])
def test_threads_on_streams_of_their_own_get_their_own_results(keys: int) -> None:
    """With scratch (split keys, a counter of tiles) and without; threads that never touched CUDA before."""
    kernel = decoding(keys)
    products = api.get_kernel("gemm", (128, 128, 128), on_miss="ignore")
    warm = normal(2, 8, 1, 128), normal(2, 2, keys, 128)
    for _ in range(8):
        kernel(warm[0], warm[1], warm[1])
        products(*(normal(128, 128) for _ in range(2)))
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(40):
                    q, k, v = normal(2, 8, 1, 128), normal(2, 2, keys, 128), normal(2, 2, keys, 128)
                    a, b = normal(128, 128), normal(128, 128)
                    found = [(kernel(q, k, v), products(a, b)) for _ in range(3)]
                    exact = reference(q, k, v), a.double() @ b.double()
                    wrong.extend(
                        one for pair in found for one, other in zip(pair, exact, strict=True) if far(one, other) > 1e-2
                    )
        except BaseException as error:  # noqa: BLE001 - told below
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("template", ["attention_tma", "attention_decode", "attention_vanilla"])
def test_a_replayed_launch_is_captured(template: str) -> None:
    problem = ops.get("attention").problem((2, 8, 1, 128), kv_heads=2, kv_len=4096, causal="bottom-right")
    kernel = served(problem, template)
    inputs = ops.get("attention").inputs(problem, "cuda", 1)
    out = torch.empty_like(inputs["q"])
    for _ in range(8):
        kernel(*inputs.values(), out=out)
        kernel(*inputs.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner = kernel(*inputs.values())
        kernel(inner, inputs["k"], inputs["v"], out=out)
    for seed in (2, 3):
        for name, value in ops.get("attention").inputs(problem, "cuda", seed).items():
            inputs[name].copy_(value)
        for _ in range(3):  # which leaves counters as it found them
            graph.replay()
        middle = reference(**inputs).bfloat16()
        assert far(inner, middle) < 1e-2
        assert far(out, reference(inner, inputs["k"], inputs["v"])) < 1e-2


def test_a_first_repeat_within_a_capture_is_right_too() -> None:
    """Nothing is traced there; the call goes the general way."""
    runtime.forget()
    a, b, out = normal(256, 128), normal(128, 256), normal(256, 256)
    kernel = api.get_kernel("gemm", (256, 256, 128), on_miss="ignore")
    kernel(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            kernel(a, b, out=out)
    a.copy_(normal(256, 128))
    graph.replay()
    assert far(out, a.double() @ b.double()) < 4e-3


def test_second_calls_keep_no_memory() -> None:
    kernel = api.get_kernel("gemm", (1024, 1024, 1024), on_miss="ignore")
    for _ in range(8):
        kernel(normal(1024, 1024), normal(1024, 1024))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        kernel(normal(1024, 1024), normal(1024, 1024))
    assert torch.cuda.memory_allocated() == before


def test_second_calls_know_of_gradients_and_inference() -> None:
    kernel = api.get_kernel("gemm", (128, 128, 128), on_miss="ignore")
    a, weight = normal(128, 128), torch.nn.Parameter(normal(128, 128))
    exact = a.double() @ weight.detach().double()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(8):
                out = kernel(a, weight)
                assert far(out, exact) < 4e-3
                assert out.is_inference() == (mode is torch.inference_mode)
    with pytest.raises(LaunchError, match="gradients"):
        kernel(a, weight)


def test_overlaps_and_alignment_are_seen_the_tenth_time_too() -> None:
    kernel = api.get_kernel("gemm", (128, 128, 128), on_miss="ignore")
    parent, b = normal(384, 128), normal(128, 128)
    for _ in range(8):
        kernel(parent[:128], b, out=parent[128:256])
    with pytest.raises(LaunchError, match="overlaps"):
        kernel(parent[:128], b, out=parent[64:192])
    odd = normal(128 * 128 + 1)[1:].view(128, 128)
    assert far(kernel(odd, b), odd.double() @ b.double()) < 4e-3


def test_functions_see_autocast_and_grad_mode_the_tenth_time_too() -> None:
    from tlxgen import functional as F  # noqa: N812 - as users import it

    q, weight = normal(1, 4, 128, 64), normal(64, 64)
    with torch.no_grad():
        for _ in range(8):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
            F.linear(q, weight)
    with torch.autocast("cuda", dtype=torch.float16):
        assert F.linear(q, weight).dtype == torch.float16
        assert F.scaled_dot_product_attention(q, q, q, is_causal=True).dtype == torch.float16
    for tensors in ((normal(1, 4, 128, 64), weight), (q, normal(64, 64))):
        assert far(F.linear(*tensors), tensors[0].double() @ tensors[1].double().T) < 4e-3
    weight.requires_grad_()
    assert F.linear(q, weight).grad_fn is not None
    assert F.scaled_dot_product_attention(q.requires_grad_(), q, q, is_causal=True).grad_fn is not None


def test_the_fast_ways_of_torch_are_there() -> None:
    """Without them calls are right, and slower in silence."""
    from tlxgen.runtime import layout, replay

    assert layout._believed()
    shape, strides = (3, 5), (8, 1)
    made = replay.allocator(shape, strides, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))()
    assert (made.shape, made.stride(), made.dtype, made.is_cuda) == (shape, strides, torch.bfloat16, True)
    assert "_empty_strided_cuda" in repr(
        replay.allocator(shape, strides, torch.bfloat16, torch.device("cuda", 0)).func  # type: ignore[attr-defined]
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_calls_on_another_device_than_the_current_one() -> None:
    with torch.cuda.device(1):
        kernel = api.get_kernel("gemm", (256, 256, 128))
    for current in (*(1,) * 8, 0, 0, 1):
        a, b = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda:1") for shape in ((256, 128), (128, 256)))
        with torch.cuda.device(current):
            result = kernel(a, b)
            assert torch.cuda.current_device() == current
        assert result.device == a.device
        assert far(result, a.double() @ b.double()) < 4e-3
    other = api.get_kernel("gemm", (256, 256, 128))
    a, b = normal(256, 128), normal(128, 256)
    for _ in range(8):
        assert far(other(a, b), a.double() @ b.double()) < 4e-3
