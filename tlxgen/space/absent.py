"""Configs that are older than a parameter of their search space, brought up to date.

A parameter that is added to a search space may say which value those configs have that were written before it was there
(`absent`). Rows and trials are completed as they are made (`tlxgen.db.record`), wherever they come from; behind that
border configs have all parameters, and are compared whole. Whether such a config still emits the code that was
measured, the hash of that code says, as of any other.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tlxgen import paths
from tlxgen.config import Config, Value
from tlxgen.errors import InvalidConfigError
from tlxgen.startup import notes

_WORD = "absent"


def completed(config: Config) -> Config:
    """The config with a value for each parameter that says what it is where it is absent; itself where none is.

    Never raises: what is wrong with a search space is told where configs are held against it.
    """
    values = _values(paths.SEARCH_SPACES, config.template)
    missing = values.keys() - config.params.keys()
    return Config(template=config.template, params={**values, **config.params}) if missing else config


@lru_cache(maxsize=256)  # templates' names come from files, and some of those from strangers
def _values(spaces: Path, template: str) -> dict[str, Value]:
    """The values of absent parameters, by name.

    Read on the way to every kernel, most of which have none: the file's text tells, without the time that YAML takes to
    import. What YAML makes of the others is noted.
    """
    if not template.isidentifier():
        return {}
    path = paths.in_operator_folder(spaces, f"{template}.yaml")
    try:
        text = "" if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    if _WORD not in text:
        return {}
    note = notes.recall(_WORD, [template, text])
    if note is not None:
        return note
    from tlxgen.space import search_space

    try:
        values = search_space.load(template).absent
    except InvalidConfigError:
        return {}
    notes.remember(_WORD, [template, text], values)
    return values
