"""Mutants of kernels: each barrier, wait and copy dropped, doubled, swapped, inverted or off by one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

#: Operations that are mutated.
SYNCHRONISING = {
    "alloc_barriers",
    "async_descriptor_load",
    "async_descriptor_store",
    "async_descriptor_store_wait",
    "async_dot_wait",
    "async_load",
    "async_load_commit_group",
    "async_load_wait_group",
    "barrier_arrive",
    "barrier_expect_bytes",
    "barrier_wait",
    "fence",
    "local_load",
    "local_store",
    "named_barrier_arrive",
    "named_barrier_wait",
    "release",
}


@dataclass(frozen=True)
class Mutant:
    """A kernel's text with one change."""

    name: str
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    """All mutants of a kernel's device code."""
    lines = text.splitlines(keepends=True)
    for body in _bodies(ast.parse(text)):
        for statement, following in zip(body, [*body[1:], None], strict=True):
            operations = _operations(statement)
            if not operations:
                continue
            first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
            indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
            own = "".join(lines[first:last])
            name = _one_line(own)
            if not isinstance(statement, ast.Assign):
                yield Mutant(f"drop: {name}", _spliced(lines, first, last, f"{indent}pass\n"))
                yield Mutant(f"double: {name}", _spliced(lines, first, last, own + own))
            if following is not None and _swappable(statement, following):
                end = following.end_lineno or following.lineno
                other = "".join(lines[last:end])
                yield Mutant(f"swap: {name} / {_one_line(other)[:40]}", _spliced(lines, first, end, other + own))
            for what, old, new in _slips(operations, own):
                yield Mutant(f"{what}: {name}", _spliced(lines, first, last, own.replace(old, new, 1)))


def _slips(operations: set[str], own: str) -> Iterator[tuple[str, str, str]]:
    """Replacements within one statement: what they do, old text, new text."""
    code = own.partition("#")[0]
    if operations & {"barrier_wait"}:
        argument = code.rstrip().rstrip(")").rpartition(", ")[2]
        yield "invert", f", {argument})", f", ({argument}) ^ 1)"
    for call in ("async_dot_wait(", "async_load_wait_group(", "async_descriptor_store_wait("):
        if call in code:
            yield "looser by one", call, f"{call}1 + "
    if "arrive_count=" in code:
        yield "one more arrival", "arrive_count=", "arrive_count=1 + "
    for call in ("barrier_expect_bytes",):
        if call in code:
            size = code.rstrip().rstrip(")").rpartition(", ")[2]
            yield "16 bytes more", f", {size})", f", {size} + 16)"
            yield "16 bytes fewer", f", {size})", f", {size} - 16)"
            yield "half", f", {size})", f", {size} // 2)"
    if "named_barrier" in code:
        yield "a warp more", "256)", "288)"
        yield "half of the threads", "256)", "128)"
        yield "another number", "_turn,", "_turn + 2,"
    if "[stage]" in code:
        yield "next stage", "[stage]", "[(stage + 1) % NUM_STAGES]"
    if "[previous]" in code:
        yield "next stage", "[previous]", "[(previous + 1) % NUM_STAGES]"
    if "async_descriptor_" in code and "[row" in code:
        yield "a row too far", "[row", "[1 + row"


def _bodies(module: ast.Module) -> Iterator[list[ast.stmt]]:
    """Statement lists of functions that are decorated, and of all blocks in them."""
    for function in module.body:
        if isinstance(function, ast.FunctionDef) and function.decorator_list:
            for node in ast.walk(function):
                body = getattr(node, "body", None)
                if isinstance(body, list):
                    yield body


def _operations(statement: ast.stmt) -> set[str]:
    """Synchronising operations that a simple statement calls."""
    if not isinstance(statement, ast.Expr | ast.Assign):
        return set()
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return {getattr(call, "attr", "") or getattr(call, "id", "") for call in calls} & SYNCHRONISING


def _swappable(statement: ast.stmt, following: ast.stmt) -> bool:
    """Whether the second statement does without the names that the first binds."""
    if not isinstance(following, ast.Expr | ast.Assign):
        return False
    bound = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return not any(isinstance(n, ast.Name) and n.id in bound for n in ast.walk(following))


def _spliced(lines: list[str], first: int, last: int, replacement: str) -> str:
    return "".join([*lines[:first], replacement, *lines[last:]])


def _one_line(text: str) -> str:
    """Statements without comments on one line, as if none had been broken over several."""
    code = " ".join(line.split("#")[0] for line in text.splitlines())
    return re.sub(r",? (?=[\])}])|(?<=[\[({]) ", "", " ".join(code.split()))
