"""Rows that come from elsewhere: whether anybody would ever look one up."""

from __future__ import annotations

import re

from tlxgen import ops
from tlxgen.errors import TlxgenError
from tlxgen.record import TunedRecord

_CAPABILITY = re.compile(r"\d{1,3}\.\d{1,3}")


def why_foreign(record: TunedRecord) -> str | None:
    """What of a row this version of tlxgen has no use for, or None. Whether its config is legal, launches ask."""
    dead = why_dead(record)
    if dead is not None:
        return dead
    key = record.key
    try:
        changed = why_another(record)
    except (TlxgenError, TypeError, ValueError, OverflowError) as error:
        return f"no problem of {key.operator}: {error}"
    if changed is not None:
        return changed
    if not (key.device.gpu and _CAPABILITY.fullmatch(key.device.capability)):
        return f"no GPU: {key.device.gpu!r} of compute capability {key.device.capability!r}"
    missing = [name for name in ("source_hash", "protocol") if not getattr(record, name)]
    missing += [] if key.toolchain else ["toolchain"]
    return f"{' and '.join(missing)} missing" if missing else None


def why_dead(record: TunedRecord) -> str | None:
    """Whether its operator, or its template, is not known."""
    operator, template = record.key.operator, record.config.template
    if operator not in ops.NAMES:
        return f"operator {operator!r} is not known; there are {', '.join(ops.NAMES)}"
    if template not in ops.get(operator).templates:
        return f"template {template!r} is not one of {operator}'s: {', '.join(ops.get(operator).templates)}"
    return None


def why_another(record: TunedRecord) -> str | None:
    """Whether its problem has other fields than a look-up would ask for.

    Raises:
        InvalidProblemError: its fields make none.
    """
    asked = record.key.problem
    fields = ops.get(record.key.operator).problem(asked).model_dump()
    if fields == asked:
        return None
    changed = ", ".join(f"{name}={value}" for name, value in fields.items() if asked.get(name) != value)
    return f"nobody would look for it: the problem in full has {changed}"
