"""`get_kernel`: the best kernel for a problem on the machine at hand, as a callable.

Selection goes down a list until something fits: the tuned row, the templates' default (the analytic model's favourite),
plain Triton, torch. `Kernel.origin` says which it was, `Kernel.explain()` why not the better ones.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from tlxgen import devices, loader, ops, toolchain
from tlxgen.candidates import default_config, favourite, vanilla_config
from tlxgen.config import Config
from tlxgen.devices import Gpu
from tlxgen.emit import emit
from tlxgen.errors import CacheError, LaunchError, NoKernelError
from tlxgen.keys import tuning_key
from tlxgen.problem import Problem
from tlxgen.record import TunedRecord

if TYPE_CHECKING:
    import torch

    from tlxgen.launch import Launcher

#: `tuned` and `predicted`: a row of the database; `default`: the model's favourite; `vanilla`: plain Triton.
Origin = Literal["tuned", "predicted", "default", "vanilla", "torch"]


class FallbackWarning(UserWarning):
    """A kernel comes from further down the list than the tuned row; said once for each problem."""


@dataclass(frozen=True)
class Choice:
    """What runs, and the account of what was passed over, best first."""

    origin: Origin
    config: Config | None
    passed_over: tuple[str, ...] = ()


def get_kernel(
    operator: str,
    shape: Problem | Sequence[int] | Mapping[str, Any],
    *,
    strict: bool = False,
    **options: Any,
) -> Kernel:
    """The best kernel for a problem on the current device.

    Args:
        operator: `gemm` or `vector_add`.
        shape: sizes in order, fields by name, or a Problem; (M, N, K) for gemm, (n,) for vector_add.
        strict: raise instead of falling back from a tuned row.
        **options: further fields of the Problem, such as `dtype`, `layout` and `epilogue`.

    Returns:
        A callable that takes the operator's tensors and returns the result; see `Kernel`.

    Raises:
        InvalidProblemError: no such operator or problem.
        NoKernelError: `strict`, and there is no tuned row for this GPU and toolchain.
    """
    problem = ops.get(operator).problem(shape, **options)
    device = _current_device()
    kernel = _kernel(problem, device)
    if strict and kernel.origin != "tuned":
        raise NoKernelError(f"{problem.label}: {kernel.explain()}")
    if kernel.origin not in ("tuned", "predicted"):
        _warn_once(problem, kernel.origin, kernel.explain())
    return kernel


class Kernel:
    """One problem's kernel: call it with the tensors.

    `gemm` takes `a` (M, K) and `b` (K, N) in the problem's layout, `bias`, `residual` or `scale` where the epilogue has
    them, and an optional `out`. Tensors that the chosen template cannot take as they lie (strides, alignment) go to
    the favourite of another template, to plain Triton or to torch, and a `FallbackWarning` says so once.
    """

    def __init__(self, problem: Problem, choice: Choice, gpu: Gpu | None) -> None:
        self.problem = problem
        self.config = choice.config
        self.origin = choice.origin
        self._choice = choice
        self._operator = ops.get(problem.operator)
        self._gpu = gpu
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._lock = threading.Lock()

    @property
    def source(self) -> str | None:
        """The emitted file's text; None where torch computes."""
        return None if self.config is None else emit(self._operator, self.problem, self.config).text

    def explain(self) -> str:
        """Which kernel this is, and why the better choices did not apply."""
        chosen = [f"{self.origin}: {self.config.short}"] if self.config else []
        return "; ".join([*self._choice.passed_over, *chosen])

    def __call__(self, *tensors: torch.Tensor, out: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        """Computes the problem on these tensors.

        Raises:
            LaunchError: a tensor has another shape, dtype or device than the problem asks for.
        """
        inputs = self._inputs(tensors, named)
        wrong = self._operator.check_call(self.problem, inputs) or self._wrong_output(inputs, out)
        if wrong:
            raise LaunchError(f"{self.problem.label}: {wrong}")
        if self.origin == "torch" or self.problem.empty:
            return self._operator.eager(self.problem, inputs, out)
        output = self._operator.output(self.problem, inputs) if out is None else out
        self._plan(inputs, output).launch(inputs, output)
        return output

    def _inputs(self, tensors: tuple[torch.Tensor, ...], named: dict[str, Any]) -> dict[str, Any]:
        names = self._operator.inputs_in_order
        if len(tensors) > len(names):
            raise LaunchError(f"{self.problem.label}: takes {len(names)} tensors by position, got {len(tensors)}")
        inputs = dict(zip(names, tensors, strict=False))
        twice = sorted(set(inputs) & set(named))
        if twice:
            raise LaunchError(f"{self.problem.label}: {twice[0]} is given twice")
        return {**self._operator.call_defaults(self.problem), **inputs, **named}

    def _wrong_output(self, inputs: dict[str, Any], out: torch.Tensor | None) -> str | None:
        """Why `out` cannot take the result: shape, dtype or device."""
        if out is None:
            return None
        shape, dtype = self._operator.output_like(self.problem)
        operands = [inputs[name] for name in self._operator.inputs_in_order]
        device = operands[0].device
        if not self.problem.empty and any(out.data_ptr() == operand.data_ptr() for operand in operands):
            return "out is one of the operands; tiles would be overwritten while others still read them"
        if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
            found = f"shape {tuple(out.shape)}, dtype {out.dtype} and device {out.device}"
            return f"out has {found}; the result has {shape}, {dtype} and {device}"
        return None

    def _plan(self, inputs: dict[str, Any], output: torch.Tensor) -> _Plan:
        """How tensors that lie in memory like these are computed; made once for each way to lie."""
        key = (_placement(output), *((name, _placement(value)) for name, value in sorted(inputs.items())))
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans.get(key)
                if plan is None:
                    plan = self._plans[key] = self._make_plan(inputs, output)
        return plan

    def _make_plan(self, inputs: dict[str, Any], output: torch.Tensor) -> _Plan:
        assert self.config is not None
        assert self._gpu is not None
        _refuse_other_devices(self.problem, inputs, output)
        if _is_capturing():
            raise LaunchError(
                f"{self.problem.label}: the kernel is not loaded yet for tensors that lie like these, and loading "
                "would break the capture of this CUDA graph; call it once before capturing"
            )
        reasons: list[str] = []
        for config in self._in_turn():
            reason = self._operator.launchable(self.problem, config, inputs, output)
            if reason is None:
                try:
                    plan = _KernelPlan(self._operator, self.problem, config, self._gpu, inputs, output)
                except MemoryError:
                    raise
                except Exception as error:
                    if type(error).__name__ == "OutOfMemoryError":  # passes, and says nothing of the config
                        raise
                    reason = f"{type(error).__name__}: {error}"
                else:
                    self._tell(reasons, config.short)
                    return plan
            reasons.append(f"{config.template}: {reason}")
        self._tell(reasons, "torch")
        return _TorchPlan(self._operator, self.problem)

    def _in_turn(self) -> Iterator[Config]:
        """The chosen config, then the favourite of each template that may take what it cannot, plain Triton last."""
        assert self.config is not None
        assert self._gpu is not None
        yield self.config
        if self.origin == "vanilla":
            return
        for template in self._operator.templates:
            if template != self.config.template:
                yield from favourite(self.problem, self._gpu, template)

    def _tell(self, reasons: list[str], instead: str) -> None:
        """Says that tensors that lie like these take another way than the chosen one."""
        if reasons:
            _warn_once(self.problem, instead, "; ".join([*reasons, f"these tensors go to {instead}"]))


def _is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    import torch

    return torch.cuda.is_current_stream_capturing()


class _Plan:
    """One way to compute."""

    def launch(self, inputs: dict[str, Any], output: torch.Tensor) -> None:
        """Writes the result to `output`."""
        raise NotImplementedError


class _TorchPlan(_Plan):
    def __init__(self, operator: Any, problem: Problem) -> None:
        self._operator = operator
        self._problem = problem

    def launch(self, inputs: dict[str, Any], output: torch.Tensor) -> None:
        output.copy_(self._operator.eager(self._problem, inputs, None))


class _KernelPlan(_Plan):
    """A compiled kernel on one device."""

    def __init__(
        self, operator: Any, problem: Problem, config: Config, gpu: Gpu, inputs: dict[str, Any], output: torch.Tensor
    ) -> None:
        import torch

        from tlxgen.launch import Launcher, SlimDescriptor

        self._arguments = operator.arguments
        self._module = loader.load(emit(operator, problem, config))
        self._device = output.device.index or 0
        self._num_sms = gpu.sm_count
        with torch.cuda.device(self._device):
            _, args = self._arguments(self._module, inputs, output, num_sms=self._num_sms)
            self._launcher: Launcher = Launcher(self._module, args, gpu.capability)
        self._options: dict[str, Any] = {"num_sms": self._num_sms}
        if self._launcher.slim:
            self._options["descriptor"] = SlimDescriptor

    def launch(self, inputs: dict[str, Any], output: torch.Tensor) -> None:
        import torch

        grid, args = self._arguments(self._module, inputs, output, **self._options)
        if not getattr(_THREAD, "ready", False):  # the dispatcher expects a CUDA context, which a new thread lacks
            torch.cuda.set_device(torch.cuda.current_device())
            _THREAD.ready = True
        if torch.cuda.current_device() == self._device:
            self._launcher(grid, _raw_stream(self._device), args)
            return
        with torch.cuda.device(self._device):
            self._launcher(grid, _raw_stream(self._device), args)


_THREAD = threading.local()


def _raw_stream(device: int) -> int:
    """The caller's current stream; `torch.cuda.current_stream().cuda_stream` is the public way, and 8 us slower."""
    import torch

    stream: int = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001
    return stream


def _placement(value: Any) -> Any:
    """What a compiled kernel may depend on: strides, alignment and device of a tensor, the sign of a number.

    An emitted `arguments` may put a sign into a copy of a tensor, which lies otherwise than the tensor itself.
    """
    stride = getattr(value, "stride", None)
    if stride is None:
        return value is not None and value < 0
    return stride(), value.data_ptr() % 16, value.device


def _refuse_other_devices(problem: Problem, inputs: dict[str, Any], output: torch.Tensor) -> None:
    for name, value in inputs.items():
        device = getattr(value, "device", output.device)
        if device.type != "cuda" or device != output.device:
            raise LaunchError(
                f"{problem.label}: {name} is on {device}, the output on {output.device}; the kernel runs on one GPU"
            )


def select(problem: Problem, gpu: Gpu | None, *, note_miss: bool = True) -> Choice:
    """Goes down the list of choices; with `note_miss` a missing row is noted for `tlxgen cache untuned`."""
    if problem.empty:
        return Choice("torch", None, ("a size is zero: nothing to launch",))
    if gpu is None:
        return Choice("torch", None, ("no CUDA GPU here: torch computes",))
    passed_over: list[str] = []
    choice = _on_hopper(problem, gpu, passed_over, note_miss=note_miss)
    if choice is not None:
        return choice
    if not ops.get(problem.operator).proven:
        passed_over.append(f"{problem.operator} kernels are new: those that were tuned here are used, nothing else")
        return Choice("torch", None, tuple(passed_over))
    config = vanilla_config(problem, gpu)
    if config is not None and _has_triton():
        return Choice("vanilla", config, tuple(passed_over))
    return Choice("torch", None, (*passed_over, "no plain Triton kernel either: torch computes"))


def _on_hopper(problem: Problem, gpu: Gpu, passed_over: list[str], *, note_miss: bool) -> Choice | None:
    """A stored row or the default; None, with the reasons added, where neither applies."""
    if gpu.capability != (9, 0):
        passed_over.append(f"compute capability {gpu.capability[0]}.{gpu.capability[1]} is not Hopper's 9.0")
        return None
    if not toolchain.has_tlx():
        passed_over.append("the installed triton has no TLX (see `tlxgen doctor`)")
        return None
    proven = ops.get(problem.operator).proven
    record, reason = _stored(problem, gpu, note_miss=note_miss)
    if record is not None and (proven or record.origin == "measured"):
        return Choice("tuned" if record.origin == "measured" else "predicted", record.config)
    passed_over.append(reason if record is None else f"the row of {problem.label} was predicted, not measured")
    config = default_config(problem, gpu)
    return Choice("default", config, tuple(passed_over)) if config is not None and proven else None


def _stored(problem: Problem, gpu: Gpu, *, note_miss: bool) -> tuple[TunedRecord | None, str]:
    """The stored row if it may be served, or why not."""
    from tlxgen import space
    from tlxgen.staleness import why_other_code

    store = _store()
    key = tuning_key(problem, gpu.key)
    record = store.get(key)
    if record is None:
        if note_miss:
            store.note_untuned(key)
        return None, f"no tuned row for {problem.label} on {gpu.slug} ({gpu.sm_count} SMs), {key.toolchain}"
    reason = space.why_illegal(ops.get(problem.operator), problem, record.config, gpu)
    if reason is not None:
        store.mark_bad(key, reason)
    else:
        reason = why_other_code(record)  # a miss, not a defect: another version of tlxgen may share the database
        if reason is None:
            return record, ""
    return None, f"the tuned row cannot be served: {reason}"


@cache
def _kernel(problem: Problem, device: int | None) -> Kernel:
    gpu = None if device is None else devices.detect(device)
    return Kernel(problem, select(problem, gpu), gpu)


@cache
def _store() -> Any:
    from tlxgen.shipped import import_shipped
    from tlxgen.store import Store

    store = Store.open()
    try:
        import_shipped(store)
    except CacheError as error:
        warnings.warn(f"shipped configs could not be imported: {error}", FallbackWarning, stacklevel=2)
    return store


#: Where other modules keep kernels; `forget` empties these too.
CACHES: list[dict[Any, Any]] = []


def forget() -> None:
    """Drops loaded kernels and the open database, so that the next `get_kernel` looks again."""
    _kernel.cache_clear()
    _store.cache_clear()
    _WARNED.clear()
    for kept in CACHES:
        kept.clear()


def _current_device() -> int | None:
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return torch.cuda.current_device()


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


_WARNED: set[tuple[Problem, str]] = set()


def _warn_once(problem: Problem, origin: str, explanation: str) -> None:
    if (problem, origin) not in _WARNED:
        _WARNED.add((problem, origin))
        warnings.warn(f"{problem.label}: {explanation}", FallbackWarning, stacklevel=3)
