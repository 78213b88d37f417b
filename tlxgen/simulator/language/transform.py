"""The rewriting of kernel source to Python that runs on the machine.

Decorators and annotations of kernels are removed; plain assignments make run-time scalars, as in Triton; each
`with tlx.async_task(...)` becomes a function, and `with tlx.async_tasks()` runs these concurrently. Line numbers do not
change, so that findings point into the file.

A name that both the kernel and a task assign is copied into the task when it starts, as the compiler captures it: each
role may step its own `stage`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

#: Names of the helpers that transformed code calls; `program` binds them.
NORMALISE, STEP, KERNEL = "__normalise", "__step", "__kernel"

#: Builtins that mean something else on run-time values: `range` is called `__range` in kernels, and so on.
BUILTINS = {name: f"__{name}" for name in ("abs", "max", "min", "range")}

_ALLOCATORS = {"alloc_barriers", "alloc_warp_barrier", "local_alloc"}


def transform(text: str, path: str) -> ast.Module:
    """The module's tree, ready to be compiled."""
    tree = ast.parse(text, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(_is_jit(decorator) for decorator in node.decorator_list):
            _transform_kernel(node)
    return ast.fix_missing_locations(tree)


def _is_jit(decorator: ast.expr) -> bool:
    """`@triton.jit`, `@jit`, `@triton.jit(...)`."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""
    return name == "jit"


def _transform_kernel(function: ast.FunctionDef) -> None:
    arguments = function.args
    everyone = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    constants = [a.arg for a in everyone if a.annotation is not None and _is_constexpr(a.annotation)]
    for argument in everyone:
        argument.annotation = None
    function.returns = None
    decorator = _call(KERNEL, ast.Constant(" ".join(constants)))
    function.decorator_list = [ast.copy_location(decorator, function)]
    body = [_Body().visit(statement) for statement in function.body]
    function.body = list(_flat(body))


def _is_constexpr(annotation: ast.expr) -> bool:
    return "constexpr" in ast.unparse(annotation)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


class _Body(ast.NodeTransformer):
    """Statements of one kernel or helper."""

    def __init__(self) -> None:
        self.tasks = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """A nested function stays as it is."""
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Builtins get their run-time versions."""
        if node.id in BUILTINS and isinstance(node.ctx, ast.Load):
            node.id = BUILTINS[node.id]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        """`x = 0` is a run-time scalar; barriers and buffers get the names that they are assigned to."""
        self.generic_visit(node)
        if _is_allocation(node.value) and isinstance(node.targets[0], ast.Name):
            assert isinstance(node.value, ast.Call)
            node.value.keywords.append(ast.keyword("name", ast.Constant(node.targets[0].id)))
        else:
            node.value = ast.copy_location(_call(NORMALISE, node.value), node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        """`x: tl.constexpr = ...` stays a plain value; any other annotation means nothing."""
        self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        value = node.value if _is_constexpr(node.annotation) else _call(NORMALISE, node.value)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_While(self, node: ast.While) -> ast.While:
        """Each iteration is a step of the scheduler, so that an endless loop becomes a finding."""
        self.generic_visit(node)
        node.body.insert(0, ast.copy_location(ast.Expr(_call(STEP)), node))
        return node

    def visit_With(self, node: ast.With) -> Any:
        """`with tlx.async_tasks()`, `with tlx.async_task(...)`."""
        call = node.items[0].context_expr
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return self.generic_visit(node)
        if call.func.attr == "async_tasks":
            return self._group(node, call)
        if call.func.attr == "async_task":
            return self._task(node, call)
        return self.generic_visit(node)

    def _group(self, node: ast.With, call: ast.Call) -> list[ast.stmt]:
        start: ast.stmt = ast.Assign([ast.Name("__tasks", ast.Store())], call)
        body = [self.visit(statement) for statement in node.body]
        run: ast.stmt = ast.Expr(ast.Call(ast.Attribute(ast.Name("__tasks", ast.Load()), "run", ast.Load()), [], []))
        return [ast.copy_location(start, node), *_flat(body), ast.copy_location(run, node)]

    def _task(self, node: ast.With, call: ast.Call) -> list[ast.stmt]:
        self.tasks += 1
        name = f"__task_{self.tasks}"
        body = list(_flat([self.visit(statement) for statement in node.body]))
        own = sorted(set(_bound(body)))
        function = _function(name, body)
        add = ast.Call(
            ast.Attribute(ast.Name("__tasks", ast.Load()), "add", ast.Load()),
            [ast.Name(name, ast.Load()), ast.Constant(node.lineno), *call.args],
            call.keywords,
        )
        captured = [variable for variable in own if not _set_first(variable, body)]
        function.args.args = [ast.arg(variable) for variable in captured]
        function.args.defaults = [_if_bound(variable) for variable in captured]
        return [ast.copy_location(function, node), _first_line(ast.Expr(add), node)]


def _first_line(statement: ast.stmt, node: ast.stmt) -> ast.stmt:
    """Gives a statement the line in which a node begins; a call of several lines would count as in its last one."""
    statement.lineno = statement.end_lineno = node.lineno
    statement.col_offset = statement.end_col_offset = node.col_offset
    return statement


def _if_bound(variable: str) -> ast.expr:
    """The kernel's value of a name, or None if it has none (Triton's compiler refuses a task that reads it)."""
    values = ast.Call(ast.Name("locals", ast.Load()), [], [])
    return ast.Call(ast.Attribute(values, "get", ast.Load()), [ast.Constant(variable)], [])


def _set_first(variable: str, body: list[ast.stmt]) -> bool:
    """Whether a task assigns a name before it reads it, and so does not capture it."""
    for statement in body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == variable]
        if names:
            return isinstance(statement, ast.Assign) and all(isinstance(name.ctx, ast.Store) for name in names)
    return False


def _function(name: str, body: list[ast.stmt]) -> ast.FunctionDef:
    function = ast.parse(f"def {name}(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    return function


def _is_allocation(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _ALLOCATORS


def _bound(statements: list[ast.stmt]) -> Iterator[str]:
    """Names that statements assign."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _flat(statements: list[ast.stmt | list[ast.stmt]]) -> Iterator[ast.stmt]:
    for statement in statements:
        if isinstance(statement, list):
            yield from statement
        else:
            yield statement
