"""Problems that differ in sizes alone share modules, binaries and plans: serving any length compiles a handful.

There is no GPU here: tensors have no memory, and what would load and launch a binary counts instead. Emitted modules,
their `arguments` and Triton's specialization of them are the real ones.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from tests.support.stub_launcher import no_card
from tlxgen import api, devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import MOST_UNTUNED, Store
from tlxgen.devices import target
from tlxgen.errors import LaunchError
from tlxgen.problem import Problem
from tlxgen.runtime import call_checks, plans
from tlxgen.runtime import kernel as runtime
from tlxgen.runtime.kernel import Kernel
from tlxgen.runtime.launch import SlimDescriptor
from tlxgen.runtime.plans import Once
from tlxgen.space.candidates import candidates, favourite

H200 = target("h200")
LENGTHS = random.Random(0).choices(range(1, 8193), k=500)


class Counting:
    """In place of a launcher: counts binaries, and remembers what was launched."""

    slim = True
    indices = None
    made: ClassVar[list[tuple[str, int]]]
    launched: ClassVar[list[tuple[Any, tuple[int, int, int]]]]

    def __init__(self, module: Any, args: Any, capability: tuple[int, int]) -> None:
        self.module = module
        self.lock = threading.Lock()
        self.made.append((module.__name__, len(args)))

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Any) -> None:
        self.dispatcher(*grid, stream, *args)

    def dispatcher(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        self.launched.append((self.module, (x, y, z)))


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, no_shipped_configs: None) -> Iterator[None]:
    """A card that there is not."""
    monkeypatch.setattr(Counting, "made", [], raising=False)
    monkeypatch.setattr(Counting, "launched", [], raising=False)
    with no_card(monkeypatch, Counting, "meta"):
        yield


def call(problem: Problem, **more: Any) -> Kernel:
    kernel = api.get_kernel(problem.operator, problem)
    kernel(**ops.get(problem.operator).inputs(problem, "meta", 0), **more)
    return kernel


def modules() -> set[str]:
    return {name for name in sys.modules if name.startswith("tlxgen_kernels.")}


def untuned() -> int:
    with Store.open() as store:
        return len(store.untuned())


def gemm(m: int) -> Problem:
    return cast("Problem", ops.get("gemm").problem((m, 4096, 4096), layout="nt"))


def prefill(length: int) -> Problem:
    sizes = (1, 32, length, 128)
    return cast("Problem", ops.get("attention").problem(sizes, kv_heads=8, causal="bottom-right"))


def decoding(length: int) -> Problem:
    sizes = (16, 32, 1, 128)
    return cast("Problem", ops.get("attention").problem(sizes, kv_heads=8, kv_len=length, causal="bottom-right"))


def packed(length: int) -> Problem:
    """A batch of 64 sequences, 8192 tokens, the longest sequence of this length."""
    return cast("Problem", ops.get("attention_varlen").problem((64, 32, 8192, 128), max_q=max(128, length)))


@pytest.mark.parametrize(
    ("made", "most"),
    [(gemm, 16), (prefill, 6), (decoding, 4), (packed, 6)],
    ids=["gemm", "attention", "decoding", "packed sequences"],
)
def test_five_hundred_random_lengths_compile_a_handful_and_tune_nothing(made: Any, most: int) -> None:
    """The numbers of docs/runtime.md; each length costs a choice, none a compilation of its own."""
    before = modules()
    origins = {call(made(length)).origin for length in LENGTHS}
    assert origins == {"default"}
    assert len(Counting.launched) == len(LENGTHS)
    assert len(Counting.made) == len(plans.LOADED) <= most
    assert len(modules() - before) <= most
    assert untuned() <= 5 * 47 if made is not gemm else 5 * 171


def test_a_growing_cache_of_keys_keeps_one_module_one_binary_and_few_notes() -> None:
    before = modules()
    cache = torch.empty(16, 8, 8192, 128, dtype=torch.bfloat16, device="meta")
    q = torch.empty(16, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    for length in range(4096, 4608):
        kernel = api.get_kernel("attention", decoding(length))
        kernel(q, cache[:, :, :length], cache[:, :, :length])
    assert len(Counting.made) == 1
    assert len(modules() - before) <= 1
    assert untuned() <= 5


def test_a_tuned_row_serves_its_neighbours_with_one_binary() -> None:
    problem = gemm(4096)
    config = candidates(problem, H200, ("gemm_tma_cooperative",))[0]
    keep(problem, config)
    kernels = [call(gemm(m)) for m in (4096, 4112, 4224, 5000, 5003, 6000)]
    assert [kernel.origin for kernel in kernels] == ["tuned"] + ["nearest"] * 5
    assert {kernel.config for kernel in kernels} == {config}
    assert kernels[3].explain().endswith(f"nearest: {config.short} (tuned for {problem.label}, 0.29 octaves away)")
    assert len(Counting.made) <= 2  # sizes that 16 divides, and others


def keep(problem: Problem, config: Any) -> None:
    operator = ops.get(problem.operator)
    record = TunedRecord(
        key=tuning_key(problem, H200.key),
        config=config,
        origin="measured",
        source_hash=emit(operator, problem, config).code_hash,
        time_us=10.0,
        protocol="graph-2",
    )
    with Store.open(read_only_ok=False) as store:
        assert store.put(record)


@pytest.mark.parametrize("name", ops.NAMES)
def test_the_code_of_a_config_depends_on_lengths_no_more_than_by_alignment(name: str) -> None:
    """What `Problem.lengths` claims, for every template."""
    operator = ops.get(name)
    if not operator.problem_type.lengths:
        pytest.skip(f"{name} has no lengths")
    problem = operator.problem(SIZES.get(name, operator.examples[0]))
    for template in operator.templates:
        (config,) = favourite(problem, H200, template)
        doubled = problem.model_copy(update={field: 2 * getattr(problem, field) for field in problem.lengths})
        one, other = emit(operator, problem, config), emit(operator, doubled, config)
        assert one.text != other.text  # the header says which
        assert one.code_hash == other.code_hash


SIZES: dict[str, dict[str, Any]] = {
    "gemm": {"M": 512, "N": 512, "K": 512},
    "attention": {"B": 2, "H": 8, "S": 64, "D": 128, "kv_heads": 8, "kv_len": 1024},
    "attention_varlen": {"B": 4, "H": 8, "total_q": 4096, "D": 128},
    "vector_add": {"n": 2**20},
    "grouped_gemm": {"E": 8, "ROWS": 4096, "N": 1024, "K": 1024},
}


class TestPlans:
    def test_of_other_strides_share_a_binary_where_triton_does(self) -> None:
        kernel = api.get_kernel("gemm", gemm(512))
        b = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta").T
        for pitch in (4096, 4112, 8192):
            kernel(torch.empty(512, pitch, dtype=torch.bfloat16, device="meta")[:, :4096], b)
        assert len(Counting.made) == 1

    def test_of_other_dtypes_do_not(self) -> None:
        """The text of their kernels is the same: dtypes come with the arguments."""
        for dtype in ("bf16", "fp16"):
            call(ops.get("gemm").problem((512, 512, 512), dtype=dtype))
        assert len(Counting.made) == 2

    def test_of_another_config_do_not(self) -> None:
        """Options of one config never reach the next: each module has its own."""
        problem = gemm(512)
        a, b, *_ = candidates(problem, H200, ("gemm_vanilla",))
        for config in (a, b, a):
            kernel = api.get_kernel("gemm", problem, config=config)
            kernel(**ops.get("gemm").inputs(problem, "meta", 0))
        assert len(Counting.made) == 2
        first, second, third = (module for module, _ in Counting.launched)
        assert first is third
        assert first is not second
        for module, config in ((first, a), (second, b)):
            assert module.OPTIONS["num_warps"] == config.params["num_warps"]

    def test_hand_out_slim_descriptors_only_to_launchers_that_take_them(self) -> None:
        kernel = call(gemm(512))
        (plan,) = kernel._plans.values()
        assert isinstance(plan, plans.KernelPlan)
        assert plan._options == {"num_sms": H200.sm_count, "descriptor": SlimDescriptor}

    def test_sixteen_cold_threads_make_each_binary_once(self) -> None:
        asked = [gemm(m) for m in (512, 528, 1024, 8192)] * 4
        barrier = threading.Barrier(len(asked))
        failures: list[BaseException] = []

        def work(problem: Problem) -> None:
            try:
                barrier.wait()
                call(problem)
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(problem,)) for problem in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(Counting.launched) == len(asked)
        assert len(Counting.made) == len(set(Counting.made)) == len(plans.LOADED)

    def test_kernels_do_not_pile_up(self) -> None:
        kernel = api.get_kernel("gemm", gemm(64))
        b = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta").T
        for extra in range(300):
            kernel(torch.empty(64, 4096 + 16 * extra, dtype=torch.bfloat16, device="meta")[:, :4096], b)
        assert len(kernel._plans) <= 256
        assert runtime._kernel.cache_info().maxsize == 4096


class TestOnce:
    def test_a_failure_is_not_kept(self) -> None:
        once = Once()

        def fail() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            once.get("key", fail)
        assert once.get("key", lambda: 1) == 1
        assert once.get("key", lambda: 2) == 1
        assert len(once) == 1


def test_capture_of_an_unloaded_kernel_is_refused_before_anything_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gemm(512)
    loaded = call(problem)
    monkeypatch.setattr(plans, "is_capturing", lambda: True)
    loaded(**ops.get("gemm").inputs(problem, "meta", 0))  # a loaded kernel is captured
    assert len(Counting.launched) == 2
    with pytest.raises(LaunchError, match="call it once before capturing"):
        call(gemm(4096))
    assert len(Counting.launched) == 2


def test_a_length_that_was_never_called_is_captured_if_its_binary_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In decoding, graphs are captured for lengths that never ran before."""
    call(decoding(5000))
    monkeypatch.setattr(plans, "is_capturing", lambda: True)
    call(decoding(5001))
    assert len(Counting.launched) == 2


def test_the_list_of_what_to_tune_has_an_end() -> None:
    with Store.open(read_only_ok=False) as store:
        wanted = tuning_key(gemm(1), H200.key)
        for _ in range(2):
            store.note_untuned(wanted)
        for m in range(2, MOST_UNTUNED + 20):
            store.note_untuned(tuning_key(gemm(m), H200.key))
        listed = [key for key, _ in store.untuned()]
    assert len(listed) == MOST_UNTUNED
    assert wanted in listed
    assert tuning_key(gemm(MOST_UNTUNED + 19), H200.key) in listed


def test_selection_is_told_apart_by_pins() -> None:
    problem = gemm(512)
    config = candidates(problem, H200, ("gemm_vanilla",))[0]
    default = api.get_kernel("gemm", problem)
    assert api.get_kernel("gemm", problem, config=config).config == config
    assert api.get_kernel("gemm", problem) is default


class TestRefusals:
    def test_gradients_that_a_kernel_would_not_record(self) -> None:
        """A model that trains where torch computes must not stop to learn where a kernel does."""
        problem = gemm(512)
        kernel = api.get_kernel("gemm", problem)
        inputs = ops.get("gemm").inputs(problem, "meta", 0)
        inputs["a"].requires_grad_()
        with pytest.raises(LaunchError, match=r"requires gradients.*tlxgen\.functional"):
            kernel(**inputs)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                kernel(**inputs)
        assert len(Counting.launched) == 2

    def test_tensors_on_another_model_of_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel of an H200 for tensors on the H100 beside it."""
        others = {0: H200, 1: target("h100-pcie")}
        output = SimpleNamespace(device=torch.device("cuda", 1))
        monkeypatch.setattr(devices, "detect", others.get)
        monkeypatch.setattr(call_checks, "KIND", "cuda")
        with pytest.raises(LaunchError, match=r"chosen for h200.*h100-pcie"):
            call_checks.refuse_other_devices(gemm(512), H200, {}, output)  # type: ignore[arg-type]


class TestSecondCalls:
    """Of tensors like those before, which are checked no more: whatever could make a difference makes another call."""

    @pytest.fixture
    def ab(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = ops.get("gemm").inputs(gemm(512), "meta", 0)
        api.get_kernel("gemm", gemm(512))(inputs["a"], inputs["b"])
        return inputs["a"], inputs["b"]

    def test_launch_the_same_plan(self, ab: tuple[torch.Tensor, torch.Tensor]) -> None:
        kernel = api.get_kernel("gemm", gemm(512))
        results = [kernel(*ab) for _ in range(3)]
        assert {(result.shape, result.dtype) for result in results} == {((512, 4096), torch.bfloat16)}
        assert (len(Counting.made), len(Counting.launched)) == (1, 4)
        assert len({(module.__name__, grid) for module, grid in Counting.launched}) == 1

    @pytest.mark.parametrize(
        "other",
        [
            lambda a: a[:511],
            lambda a: a.half(),
            lambda a: a.new_empty(512, 4095),
            lambda a: a.detach().requires_grad_(),
        ],
        ids=["fewer rows", "another dtype", "fewer columns", "gradients"],
    )
    def test_are_refused_as_first_ones(self, other: Any, ab: tuple[torch.Tensor, torch.Tensor]) -> None:
        a, b = ab
        with pytest.raises(LaunchError):
            api.get_kernel("gemm", gemm(512))(other(a), b)
        with pytest.raises(LaunchError):
            api.get_kernel("gemm", gemm(512))(a)
        with pytest.raises(LaunchError):
            api.get_kernel("gemm", gemm(512))(a, b, a)
        assert len(Counting.launched) == 1

    def test_other_strides_get_a_plan_of_their_own(self, ab: tuple[torch.Tensor, torch.Tensor]) -> None:
        kernel = api.get_kernel("gemm", gemm(512))
        assert kernel.config is not None
        assert kernel.config.template != "gemm_vanilla"
        kernel(torch.empty(512, 4097, dtype=torch.bfloat16, device="meta")[:, :4096], ab[1])  # no row is aligned
        assert "gemm_vanilla" in Counting.launched[-1][0].__name__

    def test_the_arguments_are_those_of_the_emitted_module(self, ab: tuple[torch.Tensor, torch.Tensor]) -> None:
        """A plan has a faster division; nothing else differs."""
        (plan,) = api.get_kernel("gemm", gemm(512))._plans.values()
        assert isinstance(plan, plans.KernelPlan)
        module, grid = Counting.launched[0]
        out = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta")
        expected_grid, expected = module.arguments(*ab, out, num_sms=H200.sm_count, descriptor=SlimDescriptor)
        found_grid, found = plan.arguments({"a": ab[0], "b": ab[1]}, out)
        assert found_grid == expected_grid == grid
        assert [getattr(x, "strides", x) for x in found] == [getattr(x, "strides", x) for x in expected]

    def test_negated_views_are_refused(self) -> None:
        z = torch.zeros(512, 512, dtype=torch.complex64)
        with pytest.raises(LaunchError, match="resolve_neg"):
            api.get_kernel("gemm", (512, 512, 512), dtype="fp32")(z.conj().imag, torch.zeros(512, 512))


class OutOfResources(Exception):  # noqa: N818 - as Triton's is called
    pass


@pytest.mark.parametrize(
    ("error", "bad"), [(OutOfResources("300 KB of shared memory"), True), (OSError("disk"), False)]
)
def test_a_row_that_does_not_load_is_marked_bad_and_another_template_serves(
    error: Exception, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = gemm(4096)
    config = candidates(problem, H200, ("gemm_tma_cooperative",))[0]
    keep(problem, config)

    class Failing(Counting):
        def __init__(self, module: Any, args: Any, capability: tuple[int, int]) -> None:
            if "cooperative" in module.__name__:
                raise error
            super().__init__(module, args, capability)

    monkeypatch.setattr(plans, "Launcher", Failing)
    kernel = call(problem)
    assert (kernel.origin, kernel.config) == ("tuned", config)
    ((module, _),) = Counting.launched
    assert "gemm_tma_pingpong" in module.__name__
    with Store.open() as store:
        assert bool(store.defective()) is bad
    runtime.forget()
    assert call(problem).origin == ("default" if bad else "tuned")
