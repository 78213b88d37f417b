"""Pinned configs: chosen by the user, by `pin` or an environment variable.

    with tlxgen.pin("gemm", "gemm_vanilla block_m=128 ..."):  # all gemm kernels in this block
        ...
    TLXGEN_PIN_GEMM="gemm_vanilla block_m=128 ..." python serve.py  # or the whole process

A pin applies to many problems; where it is not legal, the choice continues as without it and says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tlxgen import ops
from tlxgen.config import Config
from tlxgen.errors import InvalidConfigError

#: Followed by the operator's name in capitals.
VARIABLE = "TLXGEN_PIN_"

#: Pins of this thread or task, by operator.
_PINS: ContextVar[Mapping[str, Config] | None] = ContextVar("tlxgen_pins", default=None)


@dataclass(frozen=True)
class Pin:
    """A pinned config and where the pin comes from."""

    config: Config
    by: str
    binding: bool = False  #: whether it is for this very problem, so that a config that is not legal is an error


def as_config(operator: str, given: Config | str | Mapping[str, Any]) -> Config:
    """A config as users write it: a `Config`, the line that `show` prints, or `{"template": ..., "params": {...}}`.

    Parameters that were added to the search space since are filled in, as in rows (`tlxgen.space.absent`).

    Raises:
        InvalidProblemError: no such operator.
        InvalidConfigError: it lies outside the operator's search spaces.
    """
    if isinstance(given, str):
        config = Config.from_short(given)
    elif isinstance(given, Config):
        config = given
    else:
        try:
            config = Config.model_validate(dict(given))
        except (TypeError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise InvalidConfigError(f"config {given!r} has no template and params: {first}") from None
    from tlxgen.space import absent, search_space  # imports YAML: not for processes without pins

    config = absent.completed(config)
    outside = search_space.why_outside(ops.get(operator), config)
    if outside:
        raise InvalidConfigError(outside)
    return config


@contextmanager
def pin(operator: str, config: Config | str | Mapping[str, Any]) -> Iterator[Config]:
    """Pins a config for the operator's kernels within the block, in this thread or task, where it is legal.

    Raises:
        InvalidProblemError: no such operator.
        InvalidConfigError: the config lies outside the operator's search spaces.
    """
    chosen = as_config(operator, config)
    token = _PINS.set({**(_PINS.get() or {}), operator: chosen})
    try:
        yield chosen
    finally:
        _PINS.reset(token)


def pinned(operator: str) -> Pin | None:
    """The innermost block's pin, or else the environment's, which is cached.

    Raises:
        InvalidConfigError: what the environment variable names lies outside the operator's search spaces.
    """
    chosen = (_PINS.get() or {}).get(operator)
    return _of_environment(operator) if chosen is None else Pin(chosen, "tlxgen.pin")


@lru_cache(maxsize=32)  # part of every call of `tlxgen.functional`
def _of_environment(operator: str) -> Pin | None:
    variable = VARIABLE + operator.upper()
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return Pin(as_config(operator, text), variable)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{variable}={text!r}: {error}") from None


def forget() -> None:
    """Drops the cached environment."""
    _of_environment.cache_clear()
