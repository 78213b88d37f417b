"""Validation of rows: whether a row describes the kernel that would be emitted, whether an imported row can be used."""

from __future__ import annotations

import re
import tokenize

from jinja2 import TemplateError

from tlxgen import ops
from tlxgen.codegen.emit import emit
from tlxgen.db.record import TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.devices import Gpu
from tlxgen.errors import TlxgenError
from tlxgen.problem import Problem
from tlxgen.space import search_space
from tlxgen.toolchain import toolchain


def why_stale(record: TunedRecord) -> str | None:
    """Why the row should be tuned again, or None: another toolchain, or a config that emits other code now."""
    installed = toolchain()
    if record.key.toolchain != installed:
        return f"measured under {record.key.toolchain}, installed is {installed}"
    return why_other_code(record)


def is_tuned(problem: Problem, gpu: Gpu, store: Store) -> bool:
    """Whether there is a measured row for the problem, of the code that would be emitted today."""
    record = store.get(tuning_key(problem, gpu.key))
    return record is not None and record.origin == "measured" and why_stale(record) is None


def why_other_code(record: TunedRecord) -> str | None:
    """Why the row's config does not emit the code that was measured, or None if it does."""
    try:
        operator = ops.get(record.key.operator)
        problem = operator.problem(record.key.problem)
        outside = search_space.why_outside(
            operator, record.config
        )  # a row may come from anywhere: templates do not check it
        if outside:
            return f"its config cannot be emitted: {outside}"
        code_hash = emit(operator, problem, record.config).code_hash
    except (TlxgenError, TemplateError, ArithmeticError, KeyError, ValueError) as error:
        return f"its config cannot be emitted: {error}"
    except (SyntaxError, tokenize.TokenError) as error:
        return f"template {record.config.template} emits what is not Python: {error}"
    if code_hash != record.source_hash:
        return f"template {record.config.template} emits other code than was measured"
    return None


_CAPABILITY = re.compile(r"\d{1,3}\.\d{1,3}")


def why_foreign(record: TunedRecord) -> str | None:
    """Why this version of tlxgen cannot use a row, or None. Whether the config is legal is checked at launch."""
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
    """Why its operator or template is unknown, or None."""
    operator, template = record.key.operator, record.config.template
    if operator not in ops.NAMES:
        return f"operator {operator!r} is not known; there are {', '.join(ops.NAMES)}"
    if template not in ops.get(operator).templates:
        return f"template {template!r} is not one of {operator}'s: {', '.join(ops.get(operator).templates)}"
    return None


def why_another(record: TunedRecord) -> str | None:
    """Why its problem differs from the one that a look-up would use, or None.

    Raises:
        InvalidProblemError: its fields are no valid problem.
    """
    asked = record.key.problem
    fields = ops.get(record.key.operator).problem(asked).model_dump()
    if fields == asked:
        return None
    changed = ", ".join(f"{name}={value}" for name, value in fields.items() if asked.get(name) != value)
    return f"nobody would look for it: the problem in full has {changed}"
