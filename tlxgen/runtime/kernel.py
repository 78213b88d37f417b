"""`Kernel`, the callable that `get_kernel` returns, and the cache of kernels.

`tlxgen.runtime.selection` chooses the config. A call is checked (`call_checks`), gets a plan for its tensors' layout
(`plans`), and is repeated without either for tensors of the same layout (`repeat`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.record import tuning_key
from tlxgen.devices import Gpu
from tlxgen.errors import LaunchError, NoKernelError
from tlxgen.problem import Problem
from tlxgen.runtime import call_checks, kernel_notes, pinning, selection
from tlxgen.runtime.caches import CACHES
from tlxgen.runtime.pinning import Pin, as_config, pinned
from tlxgen.runtime.selection import Choice, FallbackWarning, Origin, select
from tlxgen.space import candidates
from tlxgen.space.candidates import favourite
from tlxgen.space.size_classes import representative
from tlxgen.startup import collector

if TYPE_CHECKING:
    import torch

    from tlxgen.runtime.plans import Plan
    from tlxgen.runtime.repeat import Repeat

__all__ = ["Choice", "FallbackWarning", "Kernel", "Origin", "forget", "kernel_for", "select"]

#: LRU size; binaries are not evicted.
_KERNELS = 4096
#: Tensor layouts that one kernel keeps plans for.
_PLANS = 256
#: Layouts that a call is compared with, for each form of call.
_REPEATS = 16
#: Failures that mark a tuned row as bad; others, such as a full disk, may pass.
_OF_THE_ROW = frozenset({"OutOfResources", "CompilationError", "PTXASError"})
#: Origins with nothing better above them.
BEST = frozenset({"pinned", "tuned"})
#: Origins without a FallbackWarning.
_SILENT = frozenset({"pinned", "tuned", "predicted", "nearest"})


def kernel_for(
    problem: Problem,
    *,
    config: Config | str | Mapping[str, Any] | None = None,
    strict: bool = False,
    note_miss: bool = True,
) -> Kernel:
    """The best kernel for a problem on the current device; see `tlxgen.get_kernel`.

    Args:
        problem: what is to be computed.
        config: the config to take; by default the pinned one, else the best that is known.
        strict: raise instead of falling back from a tuned row or a pinned config.
        note_miss: note a problem without a row for `tlxgen tune --untuned`.

    Raises:
        InvalidConfigError: `config`, or the environment's, does not exist, or `config` is not legal for the problem.
        NoKernelError: `strict`, and there is no tuned row for this GPU and toolchain.
    """
    pin = _pin(problem, config)
    kernel = _kernel(problem, _current_device(), pin, note_miss, _ROWS[0])
    if strict and kernel.origin not in BEST:
        raise NoKernelError(f"{problem.label}: {kernel.explain()}")
    if kernel.origin not in _SILENT or (pin is not None and kernel.origin != "pinned"):
        _warn_once(problem, kernel.origin, kernel.explain())
    return kernel


def is_served(problem: Problem, config: Config | str | Mapping[str, Any] | None = None) -> bool:
    """Whether `kernel_for` would serve a pinned config or a tuned row; notes no miss and warns of nothing."""
    return _kernel(problem, _current_device(), _pin(problem, config), False, _ROWS[0]).origin in BEST


def _pin(problem: Problem, config: Config | str | Mapping[str, Any] | None) -> Pin | None:
    if config is None:
        return pinned(problem.operator)
    return Pin(as_config(problem.operator, config), "config=", binding=True)


class Kernel:
    """One problem's kernel: call it with the tensors.

    `gemm` takes `a` (M, K) and `b` (K, N) in the problem's layout, `bias`, `residual` or `scale` where the epilogue has
    them, and an optional `out`. Tensors whose strides or alignment the chosen template cannot take go to the best
    config of another template, to plain Triton or to torch, with one `FallbackWarning`.
    """

    def __init__(self, problem: Problem, choice: Choice, gpu: Gpu | None) -> None:
        self.problem = problem
        self.config = choice.config
        self.origin = choice.origin
        #: Whether the library was measured to be faster; `tlxgen.functional` then calls torch.
        self.slower = choice.slower
        self._choice = choice
        self._operator = ops.get(problem.operator)
        self._gpu = gpu
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._repeats: dict[tuple[Any, ...], tuple[Repeat, ...]] = {}
        self._numbers: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # recent numeric arguments, for each form of call
        self._plain: tuple[Repeat, ...] = ()  # repeats of calls with positional tensors only, the common form
        self._defaults = self._operator.call_defaults(problem)
        self._lock = threading.Lock()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Kernel:
        """The kernel itself: it has no visible state, so a module that holds one can be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the problem: another process or GPU chooses for itself."""
        return kernel_for, (self.problem,)

    @property
    def source(self) -> str | None:
        """Text of the emitted file; None if torch computes."""
        return None if self.config is None else emit(self._operator, self.problem, self.config).text

    def explain(self) -> str:
        """Which kernel this is, and why the better choices did not apply."""
        return self._choice.explain()

    def __call__(self, *tensors: torch.Tensor, out: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        """Computes the problem on these tensors.

        Raises:
            LaunchError: a tensor has another shape, dtype or device than the problem asks for, or requires gradients
                that a kernel would not record; `out` overlaps an operand; a graph is captured before it is loaded.
        """
        if named or out is not None:
            repeated = self._repeated(tensors, out, named)
            if repeated is not None:
                self._note_written(out, named)
                return repeated
        else:
            for repeat in self._plain:
                repeated = repeat(tensors)
                if repeated is not None:
                    return repeated
        inputs = self._inputs(tensors, named)
        call_checks.refuse_wrong_tensors(self._operator, self.problem, inputs, out)
        if self.origin == "torch" or self.problem.empty:
            from tlxgen.runtime.checks import as_given

            with as_given(inputs[self._operator.inputs_in_order[0]]):
                return self._operator.eager(self.problem, inputs, out)
        call_checks.refuse_for_kernels(self._operator, self.problem, inputs, out)
        output = self._operator.output(self.problem, inputs) if out is None else out
        plan = self.plan(inputs, output)
        plan.launch(inputs, output)
        self._note_written(out, named)
        self._remember(plan, tensors, out, named, inputs, output)
        return output

    def _note_written(self, out: torch.Tensor | None, named: Mapping[str, Any]) -> None:
        """Increments the version of written tensors, as torch's operations do, so that autograd notices the change."""
        for tensor in (out, *(named.get(name) for name in self._operator.also_written)):
            if tensor is not None and not tensor.is_inference():
                import torch

                torch.autograd.graph.increment_version(tensor)

    def _repeated(
        self, tensors: tuple[torch.Tensor, ...], out: torch.Tensor | None, named: dict[str, Any]
    ) -> torch.Tensor | None:
        """The result of a call that repeats an earlier one, or None."""
        for repeat in self._repeats.get((len(tensors), out is not None, *named), ()):
            chosen = repeat.chosen(tensors, out, named)
            result = None if chosen is None else repeat(chosen)
            if result is not None:
                return result
        return None

    def _remember(
        self,
        plan: Plan,
        tensors: tuple[torch.Tensor, ...],
        out: torch.Tensor | None,
        named: dict[str, Any],
        inputs: dict[str, Any],
        output: torch.Tensor,
    ) -> None:
        """Stores a `Repeat`, so that calls of this form and layout skip checks and planning."""
        from tlxgen.runtime.repeat import Repeat, repeatable

        if not repeatable(tensors if out is None else (*tensors, out), named):
            return
        form = (len(tensors), out is not None, *named)
        with self._lock:
            numbers = tuple(value for value in named.values() if isinstance(value, int | float))
            of_late = self._numbers.get(form, ())
            if numbers and numbers not in of_late:  # numbers may change with every call
                if len(self._numbers) >= _PLANS:
                    self._numbers.clear()
                self._numbers[form] = (numbers, *of_late)[:_REPEATS]
                return
            known = self._repeats.get(form, ())
            for repeat in known:
                chosen = repeat.chosen(tensors, out, named)
                if chosen is not None and repeat.like(chosen):
                    return
            order = self._operator.inputs_in_order[: len(tensors)]
            also = self._operator.also_written
            made = Repeat(
                plan,
                inputs,
                order,
                named,
                output,
                written=out is not None,
                in_place=call_checks.IN_PLACE,
                also_written=also,
            )
            if len(self._repeats) >= _PLANS:
                self._repeats.clear()
            known = self._repeats[form] = (made, *known)[:_REPEATS]
            if out is None and not named:
                self._plain = known

    def _inputs(self, tensors: tuple[torch.Tensor, ...], named: dict[str, Any]) -> dict[str, Any]:
        names = self._operator.inputs_in_order
        if len(tensors) > len(names):
            raise LaunchError(f"{self.problem.label}: takes {len(names)} tensors by position, got {len(tensors)}")
        inputs = dict(zip(names, tensors, strict=False))
        twice = sorted(set(inputs) & set(named))
        if twice:
            raise LaunchError(f"{self.problem.label}: {twice[0]} is given twice")
        return {**self._defaults, **inputs, **named}

    def plan(self, inputs: dict[str, Any], output: torch.Tensor) -> Plan:
        """The plan for tensors of this layout, cached."""
        key = (_placement(output), *((name, _placement(value)) for name, value in sorted(inputs.items())))
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans.get(key)
                if plan is None:
                    if len(self._plans) >= _PLANS:
                        self._plans.clear()
                    plan = self._plans[key] = self._make_plan(inputs, output)
        return plan

    def _make_plan(self, inputs: dict[str, Any], output: torch.Tensor) -> Plan:
        assert self.config is not None
        assert self._gpu is not None
        call_checks.refuse_other_devices(self.problem, self._gpu, inputs, output)
        with collector.paused():
            from tlxgen.codegen import loader
            from tlxgen.runtime import plans

        capturing = plans.is_capturing()
        reasons: list[str] = []
        for config in self._in_turn():
            reason = self._operator.launchable(self.problem, config, inputs, output)
            if reason is None:
                recalled = kernel_notes.recall(self.problem, config, self._gpu)
                source = recalled or emit(self._operator, self.problem, config)
                known = recalled is not None or loader.loaded(source) is not None
                if capturing and not plans.is_loaded(self._operator, source, self._gpu, inputs, output):
                    raise LaunchError(
                        f"{self.problem.label}: the kernel is not loaded yet for tensors that lie like these, and "
                        "loading would break the capture of this CUDA graph; call it once before capturing"
                    )
                try:
                    plan = plans.kernel_plan(self._operator, source, self._gpu, inputs, output)
                except MemoryError:
                    raise
                except Exception as error:
                    if type(error).__name__ == "OutOfMemoryError":  # may pass, and says nothing about the config
                        raise
                    reason = f"{type(error).__name__}: {error}"
                    if config == self.config and self.origin == "tuned" and type(error).__name__ in _OF_THE_ROW:
                        selection.store().mark_bad(tuning_key(self.problem, self._gpu.key), reason)
                else:
                    if not known:  # one note per loaded module, not per length
                        kernel_notes.remember(source, self._gpu)
                    self._tell(reasons, config.short)
                    return plan
            reasons.append(f"{config.template}: {reason}")
        self._tell(reasons, "torch")
        return plans.TorchPlan(self._operator, self.problem)

    def _in_turn(self) -> Iterator[Config]:
        """The chosen config, then the best of every other template; plain Triton is last."""
        assert self.config is not None
        assert self._gpu is not None
        yield self.config
        if self.origin == "vanilla":
            return
        for template in self._operator.templates:
            if template != self.config.template:
                yield from favourite(self.problem, self._gpu, template)

    def _tell(self, reasons: list[str], instead: str) -> None:
        """Warns that tensors of this layout are not served by the chosen config."""
        if reasons:
            _warn_once(self.problem, instead, "; ".join([*reasons, f"these tensors go to {instead}"]))


def _placement(value: Any) -> Any:
    """What a plan may depend on: strides, alignment and device of a tensor, the sign of a number.

    An emitted `arguments` may fold a negative scale into a copy of a tensor, which has another layout.
    """
    stride = getattr(value, "stride", None)
    if stride is None:
        return value is not None and value < 0
    return stride(), value.data_ptr() % 16, value.device, value.is_neg()


#: Number of times that this process changed rows. It is part of the cache key, so that a choice begun by another thread
#: before the change is not served after it.
_ROWS = [0]


@lru_cache(maxsize=_KERNELS)
def _kernel(problem: Problem, device: int | None, pin: Pin | None, note_miss: bool, _rows: int) -> Kernel:
    with collector.paused():
        gpu = None if device is None else devices.present(device)
        return Kernel(problem, select(problem, gpu, note_miss=note_miss, pin=pin), gpu)


def look_again() -> None:
    """Drops cached choices, so that the next `kernel_for` reads the rows again; loaded binaries stay."""
    _ROWS[0] += 1
    selection.neighbourhood.cache_clear()
    _kernel.cache_clear()


def forget() -> None:
    """Drops cached kernels and the open database, so that the next `get_kernel` starts anew."""
    import sys

    _kernel.cache_clear()
    selection.forget()
    candidates.forget()
    pinning.forget()
    _WARNED.clear()
    if "tlxgen.runtime.plans" in sys.modules:
        sys.modules["tlxgen.runtime.plans"].LOADED.clear()
    for kept in CACHES:
        kept.clear()


def _current_device() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    return None if torch.version.hip and devices.present(index) is None else index


_WARNED: set[tuple[Problem, str]] = set()


def _warn_once(problem: Problem, origin: str, explanation: str) -> None:
    """Issues one FallbackWarning for each size class and origin."""
    key = representative(problem), origin
    if key not in _WARNED:
        _WARNED.add(key)
        warnings.warn(f"{problem.label}: {explanation}", FallbackWarning, stacklevel=4)
