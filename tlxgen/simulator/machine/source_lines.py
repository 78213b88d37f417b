"""Lines of the kernel's file on the call stack: the line of a finding, and the lines that called the helper there."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import CodeType


def of_stack(files: frozenset[str]) -> list[int]:
    """Lines of these files that are being run, innermost first."""
    calls, frame = [], inspect.currentframe()
    while frame is not None:
        calls.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _lines(calls, files)


def of_error(error: BaseException, files: frozenset[str]) -> list[int]:
    """Lines of these files that an exception was raised through, innermost first."""
    calls, traceback = [], error.__traceback__
    while traceback is not None:
        calls.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _lines(reversed(calls), files)


def called_from(lines: Sequence[int]) -> str:
    """The calling lines in words, each once (a recursion repeats them); empty if there are none."""
    distinct = dict.fromkeys(lines)
    return f" (called from line {', from line '.join(map(str, distinct))})" if distinct else ""


def _lines(calls: Iterable[tuple[CodeType, int]], files: frozenset[str]) -> list[int]:
    lines, inside = [], False
    for code, line in calls:
        if code.co_filename in files:
            if not inside:
                lines.append(line)
            inside = code.co_name.startswith("<")  # a comprehension or lambda is no call in the source
    return lines
