"""Rows that come from elsewhere: whether anybody would ever look one up."""

from __future__ import annotations

import re

from tlxgen import ops
from tlxgen.errors import TlxgenError
from tlxgen.record import TunedRecord

_CAPABILITY = re.compile(r"\d{1,3}\.\d{1,3}")


def why_foreign(record: TunedRecord) -> str | None:
    """What of a row this version of tlxgen has no use for, or None. Whether its config is legal, launches ask."""
    key, template = record.key, record.config.template
    if key.operator not in ops.NAMES:
        return f"operator {key.operator!r} is not known; there are {', '.join(ops.NAMES)}"
    operator = ops.get(key.operator)
    if template not in operator.templates:
        return f"template {template!r} is not one of {key.operator}'s: {', '.join(operator.templates)}"
    try:
        problem = operator.problem(key.problem)
    except (TlxgenError, TypeError, ValueError, OverflowError) as error:
        return f"no problem of {key.operator}: {error}"
    fields = problem.model_dump()
    if fields != key.problem:
        changed = ", ".join(f"{name}={value}" for name, value in fields.items() if key.problem.get(name) != value)
        return f"not a problem in full, which has {changed}"
    if not (key.device.gpu and _CAPABILITY.fullmatch(key.device.capability)):
        return f"no GPU: {key.device.gpu!r} of compute capability {key.device.capability!r}"
    missing = [name for name in ("source_hash", "protocol") if not getattr(record, name)]
    missing += [] if key.toolchain else ["toolchain"]
    return f"{' and '.join(missing)} missing" if missing else None
