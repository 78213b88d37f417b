"""Exceptions that tlxgen raises on purpose.

A message names the argument, the value, the rule and the remedy. The command line prints it as one line;
`exit_code` says how the process ends (2: bad input, 1: a failed run).
"""

from __future__ import annotations


class TlxgenError(Exception):
    """Base of all errors that tlxgen raises on purpose."""

    exit_code = 1


class InvalidProblemError(TlxgenError, ValueError):
    """A shape, dtype, layout or option that no kernel of the operator can serve."""

    exit_code = 2


class InvalidConfigError(TlxgenError, ValueError):
    """An unknown template or parameter, or a value outside its search space."""

    exit_code = 2


class UnsupportedDeviceError(TlxgenError):
    """The request needs another GPU, or any GPU."""

    exit_code = 2


class ToolchainError(TlxgenError):
    """The installed `triton` lacks TLX, or a tool that ships with it is missing."""


class OutputError(TlxgenError):
    """A requested file cannot be written."""

    exit_code = 2


class CompileError(TlxgenError):
    """A candidate did not compile.

    Attributes:
        kind: one of `out_of_resources`, `ptxas`, `compiler_error`, `compiler_crash`, `killed`, `timeout`, `rejected`,
            `unsafe`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str]]:
        """Both arguments, so that the error can be pickled between processes."""
        return type(self), (self.kind, str(self))


class TuningError(TlxgenError):
    """No candidate survived compilation, the accuracy gate and timing."""


class GpuLostError(TuningError):
    """The GPU no longer responds, not even to a new process."""


class CacheError(TlxgenError):
    """The tuned-config database cannot be opened, read or written."""


class NoKernelError(TlxgenError):
    """`strict=True` and no tuned kernel exists for the problem."""


class LaunchError(TlxgenError, ValueError):
    """Tensors that do not fit the kernel they were given to."""
