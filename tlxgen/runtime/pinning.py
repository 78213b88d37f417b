"""Configs that the user chose, in place of the search for one.

    with tlxgen.pin("gemm", "gemm_vanilla block_m=128 ..."):  # whatever asks for a gemm kernel in this block
        ...
    TLXGEN_PIN_GEMM="gemm_vanilla block_m=128 ..." python serve.py  # or in this process

A pin covers many problems: where it is not legal the choice goes on as if there were none, and says so.
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

#: Of this thread or task, by operator.
_PINS: ContextVar[Mapping[str, Config] | None] = ContextVar("tlxgen_pins", default=None)


@dataclass(frozen=True)
class Pin:
    """A config, and who asks for it."""

    config: Config
    by: str
    binding: bool = False  #: whether it is for this very problem, so that a config that is not legal is an error


def as_config(operator: str, given: Config | str | Mapping[str, Any]) -> Config:
    """A config as users write it: a `Config`, the line that `show` prints, or `{"template": ..., "params": {...}}`.

    One that was written before a parameter came is completed, as rows are (`tlxgen.space.absent`).

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
    from tlxgen.space import absent, search_space  # brings YAML and more, of which a process without pins has no need

    config = absent.completed(config)
    outside = search_space.why_outside(ops.get(operator), config)
    if outside:
        raise InvalidConfigError(outside)
    return config


@contextmanager
def pin(operator: str, config: Config | str | Mapping[str, Any]) -> Iterator[Config]:
    """Within the block, in this thread or task, kernels of the operator have this config where it is legal.

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
    """The innermost block's pin, else that of the environment, which is read once.

    Raises:
        InvalidConfigError: what the environment variable names lies outside the operator's search spaces.
    """
    chosen = (_PINS.get() or {}).get(operator)
    return _of_environment(operator) if chosen is None else Pin(chosen, "tlxgen.pin")


@lru_cache(maxsize=32)  # on the way of every call of `tlxgen.functional`
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
    """Reads the environment anew."""
    _of_environment.cache_clear()
