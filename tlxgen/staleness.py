"""Whether a stored row still speaks of the kernel that would be emitted today."""

from __future__ import annotations

import tokenize

from jinja2 import TemplateError

from tlxgen import ops, space
from tlxgen.devices import Gpu
from tlxgen.emit import emit
from tlxgen.errors import TlxgenError
from tlxgen.keys import tuning_key
from tlxgen.problem import Problem
from tlxgen.record import TunedRecord
from tlxgen.store import Store
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
        outside = space.why_outside(operator, record.config)  # a row may come from anywhere: templates do not check it
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
