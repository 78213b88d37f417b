"""From a problem to a callable: which config serves it, how a call is checked, planned, launched and repeated."""

from __future__ import annotations

from typing import Any


def _chosen_again(problem: Any) -> Any:
    """Unpickles kernels that were pickled by earlier versions."""
    from tlxgen.runtime.kernel import kernel_for

    return kernel_for(problem)
