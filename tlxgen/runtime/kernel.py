"""`get_kernel`: the best kernel for a problem on the machine at hand, as a callable.

`tlxgen.runtime.selection` decides which config that is, `tlxgen.runtime.plans` how a call is computed. `Kernel.origin`
says where the config comes from, `Kernel.explain()` why it is not a better one.
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
from tlxgen.runtime import kernel_notes, pinning, selection
from tlxgen.runtime.caches import CACHES
from tlxgen.runtime.overlap import overlap, overlaps_itself, same
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

#: Kernels that are kept; one that was not asked for for longest goes first, its binary stays.
_KERNELS = 4096
#: Ways to lie in memory that one kernel keeps plans for.
_PLANS = 256
#: Ways to lie that calls of one form are asked about one after the other.
_REPEATS = 16
_KIND = "cuda"  # of the devices that kernels run on
_IN_PLACE = "residual"  # the operand that may be the output itself: each element is read by whoever writes it
#: Failures that say of a tuned row that it cannot be served; others may pass, such as a full disk.
_OF_THE_ROW = frozenset({"OutOfResources", "CompilationError", "PTXASError"})
#: Origins that nothing better can displace.
BEST = frozenset({"pinned", "tuned"})
#: Origins that need no word: what was measured, and what the user chose.
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
    """Whether `kernel_for` has the pinned config or a tuned row for the problem; notes and says nothing."""
    return _kernel(problem, _current_device(), _pin(problem, config), False, _ROWS[0]).origin in BEST


def _pin(problem: Problem, config: Config | str | Mapping[str, Any] | None) -> Pin | None:
    if config is None:
        return pinned(problem.operator)
    return Pin(as_config(problem.operator, config), "config=", binding=True)


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
        self.slower = choice.slower  #: than the library, where it was measured; `tlxgen.functional` calls torch then
        self._choice = choice
        self._operator = ops.get(problem.operator)
        self._gpu = gpu
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._repeats: dict[tuple[Any, ...], tuple[Repeat, ...]] = {}
        self._numbers: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # of each form, those of calls of late
        self._plain: tuple[Repeat, ...] = ()  # those of calls with tensors by position alone, which most are
        self._defaults = self._operator.call_defaults(problem)
        self._lock = threading.Lock()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Kernel:
        """The same: a kernel has no state that calls would see, and a module that holds one may be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it is the problem: another process, or GPU, chooses for itself."""
        return kernel_for, (self.problem,)

    @property
    def source(self) -> str | None:
        """The emitted file's text; None where torch computes."""
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
        wrong = self._operator.check_call(self.problem, inputs) or self._wrong_output(inputs, out)
        if wrong:
            raise LaunchError(f"{self.problem.label}: {wrong}")
        from tlxgen.runtime.checks import as_given, unseen

        operands = [inputs[name] for name in self._operator.inputs_in_order]
        if self.origin == "torch" or self.problem.empty:
            with as_given(operands[0]):
                return self._operator.eager(self.problem, inputs, out)
        reason = unseen(operands)
        if reason:
            raise LaunchError(f"{self.problem.label}: {reason}; use tlxgen.functional, which gives such calls to torch")
        for name, value in {**inputs, "out": out}.items():
            if hasattr(value, "data_ptr") and not value.is_meta and value.numel() and not value.data_ptr():
                raise LaunchError(f"{self.problem.label}: {name} has no memory: it was given back, or never there")
        if _recorded(inputs, out):
            raise LaunchError(
                f"{self.problem.label}: a tensor requires gradients, and a kernel records none; use tlxgen.functional, "
                "which has them, or torch.no_grad()"
            )
        output = self._operator.output(self.problem, inputs) if out is None else out
        plan = self.plan(inputs, output)
        plan.launch(inputs, output)
        self._note_written(out, named)
        self._remember(plan, tensors, out, named, inputs, output)
        return output

    def _note_written(self, out: torch.Tensor | None, named: Mapping[str, Any]) -> None:
        """As torch's own operations do of what they write to: autograd refuses to go on with another value."""
        for tensor in (out, *(named.get(name) for name in self._operator.also_written)):
            if tensor is not None and not tensor.is_inference():
                import torch

                torch.autograd.graph.increment_version(tensor)

    def _repeated(
        self, tensors: tuple[torch.Tensor, ...], out: torch.Tensor | None, named: dict[str, Any]
    ) -> torch.Tensor | None:
        """The result of a call like one before; None if there was none."""
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
        """The next call like this one needs no checks, but of what makes it like this one."""
        from tlxgen.runtime.repeat import Repeat, repeatable

        if not repeatable(tensors if out is None else (*tensors, out), named):
            return
        form = (len(tensors), out is not None, *named)
        with self._lock:
            numbers = tuple(value for value in named.values() if isinstance(value, int | float))
            of_late = self._numbers.get(form, ())
            if numbers and numbers not in of_late:  # they may be others with every call
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
                plan, inputs, order, named, output, written=out is not None, in_place=_IN_PLACE, also_written=also
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

    def _wrong_output(self, inputs: dict[str, Any], out: torch.Tensor | None) -> str | None:
        """Why `out` cannot take the result, or an input that is written, too, what is written there."""
        for written in (name for name in self._operator.also_written if name in inputs):
            for name, value in inputs.items():
                if name != written and hasattr(value, "data_ptr") and overlap(inputs[written], value):
                    return f"{written} is written, and shares memory with {name}"
        if out is None:
            return None
        shape, dtype = self._operator.output_like(self.problem)
        device = inputs[self._operator.inputs_in_order[0]].device
        if overlaps_itself(out):
            return f"out has strides {out.stride()}, by which elements share memory"
        for name, value in inputs.items():
            if hasattr(value, "data_ptr") and overlap(out, value) and not (name == _IN_PLACE and same(out, value)):
                return (
                    f"out is one of the operands, or overlaps one, {name}: tiles would be overwritten while others "
                    "read them"
                )
        if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
            found = f"shape {tuple(out.shape)}, dtype {out.dtype} and device {out.device}"
            return f"out has {found}; the result has {shape}, {dtype} and {device}"
        return None

    def plan(self, inputs: dict[str, Any], output: torch.Tensor) -> Plan:
        """How tensors that lie in memory like these are computed; made once for each way to lie."""
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
        _refuse_other_devices(self.problem, inputs, output)
        _refuse_another_gpu(self.problem, self._gpu, output)
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
                    if type(error).__name__ == "OutOfMemoryError":  # passes, and says nothing of the config
                        raise
                    reason = f"{type(error).__name__}: {error}"
                    if config == self.config and self.origin == "tuned" and type(error).__name__ in _OF_THE_ROW:
                        selection.store().mark_bad(tuning_key(self.problem, self._gpu.key), reason)
                else:
                    if not known:  # one note for each module that a process loads, not for each length that it serves
                        kernel_notes.remember(source, self._gpu)
                    self._tell(reasons, config.short)
                    return plan
            reasons.append(f"{config.template}: {reason}")
        self._tell(reasons, "torch")
        return plans.TorchPlan(self._operator, self.problem)

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


def _placement(value: Any) -> Any:
    """What a compiled kernel may depend on: strides, alignment and device of a tensor, the sign of a number.

    An emitted `arguments` may put a sign into a copy of a tensor, which lies otherwise than the tensor itself.
    """
    stride = getattr(value, "stride", None)
    if stride is None:
        return value is not None and value < 0
    return stride(), value.data_ptr() % 16, value.device, value.is_neg()


def _recorded(inputs: dict[str, Any], out: torch.Tensor | None) -> bool:
    """Whether autograd would have to know of the call."""
    tensors = [*inputs.values(), out]
    if not any(getattr(value, "requires_grad", False) for value in tensors):
        return False
    import torch

    return torch.is_grad_enabled()


def _refuse_another_gpu(problem: Problem, gpu: Gpu, output: torch.Tensor) -> None:
    """Of one machine with several models: a config, and a binary, are for one of them."""
    there = devices.present(output.device.index) if output.device.type == "cuda" else None
    if there is not None and there.key != gpu.key:
        raise LaunchError(
            f"{problem.label}: the kernel was chosen for {gpu.slug} ({gpu.sm_count} SMs), the tensors are on "
            f"{output.device}, {there.slug} ({there.sm_count} SMs); call get_kernel under torch.cuda.device"
        )


def _refuse_other_devices(problem: Problem, inputs: dict[str, Any], output: torch.Tensor) -> None:
    for name, value in {**inputs, "out": output}.items():
        if hasattr(value, "is_neg") and value.is_neg():
            raise LaunchError(
                f"{problem.label}: {name} is negated when read, which a kernel misses; call resolve_neg()"
            )
        device = getattr(value, "device", output.device)
        if device.type != _KIND or device != output.device:
            raise LaunchError(
                f"{problem.label}: {name} is on {device}, the output on {output.device}; the kernel runs on one GPU"
            )


#: Counts how often rows have changed under this process's hands: a choice that another thread began before the change
#: is filed under the old number, and never served after it.
_ROWS = [0]


@lru_cache(maxsize=_KERNELS)
def _kernel(problem: Problem, device: int | None, pin: Pin | None, note_miss: bool, _rows: int) -> Kernel:
    with collector.paused():
        gpu = None if device is None else devices.present(device)
        return Kernel(problem, select(problem, gpu, note_miss=note_miss, pin=pin), gpu)


def look_again() -> None:
    """Drops choices, not binaries: the next `kernel_for` looks at the rows anew."""
    _ROWS[0] += 1
    selection.neighbourhood.cache_clear()
    _kernel.cache_clear()


def forget() -> None:
    """Drops loaded kernels and the open database, so that the next `get_kernel` looks again."""
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
    """Says once for each class of sizes what happens instead of a tuned kernel."""
    key = representative(problem), origin
    if key not in _WARNED:
        _WARNED.add(key)
        warnings.warn(f"{problem.label}: {explanation}", FallbackWarning, stacklevel=4)
