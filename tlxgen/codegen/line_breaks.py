"""Breaks long lines of emitted code as `ruff format` does, so that templates may write calls on one line."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator

WIDTH = 120

_OPEN, _CLOSE = "([{", ")]}"


def broken(text: str) -> str:
    """The text with each statement that is longer than `WIDTH` columns spread over several lines.

    Only statements on one line without a comment are touched; comments and docstrings are the templates' business.
    """
    lines = text.splitlines()
    if max(map(len, lines), default=0) <= WIDTH:
        return text
    whole = _statements(text)
    made = (part for n, line in enumerate(lines, 1) for part in (_spread(line) if n in whole else [line]))
    return "\n".join(made) + "\n"


def _statements(text: str) -> set[int]:
    """Numbers of the long lines that are one statement each."""
    found, first, plain = set(), 0, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type == tokenize.COMMENT:
            plain = plain and not first
            continue
        if token.type == tokenize.NEWLINE:
            if plain and first == token.start[0] and token.start[1] > WIDTH:
                found.add(first)
            first, plain = 0, True
            continue
        first = first or token.start[0]
    return found


def _spread(line: str) -> list[str]:
    """The line, or its parts: head up to the last bracket that opens at the top level, arguments, tail."""
    opening = _last_group(line) if len(line) > WIDTH else None
    if opening is None:
        return [line]
    start, end = opening
    indent = line[: len(line) - len(line.lstrip())]
    head, body, tail = line[: start + 1], line[start + 1 : end].strip(), indent + line[end:]
    inner = f"{indent}    {body}"
    call = start > 0 and (line[start - 1].isidentifier() or line[start - 1] in _CLOSE)
    if call and len(inner) <= WIDTH:  # tuples and lists have an element a line
        return [head, inner, tail]
    arguments = list(_arguments(body))
    return [head, *(part for one in arguments for part in _spread(f"{indent}    {one},")), tail]


def _last_group(line: str) -> tuple[int, int] | None:
    """Where the last bracket pair at the top level opens and closes, if it holds anything."""
    depth, start, found = 0, 0, None
    for place, character in enumerate(line):
        if character in _OPEN:
            start = place if depth == 0 else start
            depth += 1
        elif character in _CLOSE:
            depth -= 1
            if depth == 0 and place > start + 1:
                found = start, place
    return found


def _arguments(body: str) -> Iterator[str]:
    """The parts of an argument list, split at its own commas."""
    depth, start = 0, 0
    for place, character in enumerate(body):
        depth += (character in _OPEN) - (character in _CLOSE)
        if character == "," and depth == 0:
            yield body[start:place].strip()
            start = place + 1
    if body[start:].strip():
        yield body[start:].strip()
