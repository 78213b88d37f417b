"""Caches of other modules that `tlxgen.runtime.kernel.forget` empties."""

from __future__ import annotations

from typing import Any

#: Dicts that hold kernels or results about them.
CACHES: list[dict[Any, Any]] = []
