"""Brings stored configs up to date with their search space.

A search space may give a value for configs that were stored before a parameter was added (`absent`), and the value that
templates kept of a parameter that was removed (`retired`). Rows and trials are updated when they are read
(`tlxgen.db.record`), so that all other code sees configs with exactly the parameters of the space. Whether the config
still emits the code that was measured is decided by the hash of that code.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from tlxgen import paths
from tlxgen.config import Config, Value
from tlxgen.errors import InvalidConfigError
from tlxgen.startup import notes

_WORDS = ("absent", "retired")

Values = dict[str, Value]


def completed(config: Config) -> Config:
    """The config with `absent` values filled in and `retired` values dropped; the same object if nothing changes.

    A removed parameter with another value than the retired one is kept: `tlxgen.space.search_space` says why such a
    config is illegal. Never raises: an invalid search space is reported where configs are checked against it.
    """
    absent, retired = _values(paths.SEARCH_SPACES, config.template)
    given = config.params
    missing = {name: value for name, value in absent.items() if name not in given}
    dropped = {name for name in retired if name in given and _same(given[name], retired[name])}
    if not missing and not dropped:
        return config
    kept = {name: value for name, value in given.items() if name not in dropped}
    return Config(template=config.template, params={**missing, **kept})


def _same(one: Value, other: Value) -> bool:
    """Whether values are equal and of the same type: `True` is not 1."""
    return type(one) is type(other) and one == other


@lru_cache(maxsize=256)  # bounded: imported rows may name any template
def _values(spaces: Path, template: str) -> tuple[Values, Values]:
    """`absent` and `retired` values of a template's search space; empty if it is invalid or missing.

    Called on the way to every kernel, so YAML is imported only if the file contains one of the words, and what it says
    is then noted for later processes.
    """
    if not template.isidentifier():
        return {}, {}
    path = paths.in_operator_folder(spaces, f"{template}.yaml")
    try:
        text = "" if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}, {}
    if not any(word in text for word in _WORDS):
        return {}, {}
    note: dict[str, Any] | None = notes.recall("absent", [template, text])
    if note is None or note.keys() != set(_WORDS):
        from tlxgen.space import search_space

        try:
            space = search_space.load(template)
        except InvalidConfigError:
            return {}, {}
        note = {"absent": space.absent, "retired": space.retired}
        notes.remember("absent", [template, text], note)
    return note["absent"], note["retired"]
