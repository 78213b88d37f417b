"""Renders a stand-alone kernel file: Problem and Config → KernelSource.

Deterministic: equal input gives equal bytes. Decisions are made in Python, by the operator's `template_context`; an
undefined template variable is an error.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tlxgen._version import __version__
from tlxgen.config import Config
from tlxgen.ops.base import Operator
from tlxgen.problem import Problem


@dataclass(frozen=True)
class KernelSource:
    """An emitted file: its text, and the problem and config that it was emitted for."""

    operator: str
    problem: Problem
    config: Config
    text: str

    @cached_property
    def code_hash(self) -> str:
        """Hash of the code without comments, docstrings and self-check.

        Sources with equal hashes compile to the same kernel, so a stored measurement is valid as long as its hash is
        that of the code emitted today. It is made of tokens, which are the same in every supported Python (dumps of
        syntax trees are not).
        """
        # Dtypes reach a kernel through its arguments; the text need not contain them.
        fields = self.problem.model_dump(exclude={*self.problem.sizes, *self.problem.extents})
        return _code_hash(_OF_ONE_SIZE.sub("", self.text), json.dumps(fields, sort_keys=True))

    @property
    def file_name(self) -> str:
        """A name made from a hash of the text, so that no two variants share a module or a stale .pyc file."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:16]
        return f"{self.config.template}_{digest}.py"


#: Columns before the values of an emitted file's header, and before their continuation lines.
HEADER_INDENT = 14

#: Places that contain sizes only: the problem line of the docstring, and the defaults of the self-check.
_OF_ONE_SIZE = re.compile(r"^    problem   .*$|(?<=^def check\().*(?=\):$)", re.MULTILINE)


@lru_cache(maxsize=256)  # tokenizing takes ten times as long as emitting; sizes that share a kernel share an entry
def _code_hash(text: str, fields: str) -> str:
    skipped = _lines_without_effect(ast.parse(text))
    tokens = _formatted_strings_whole(text, tokenize.generate_tokens(io.StringIO(text).readline))
    code = [_MARKS.get(t.type, t.string) for t in tokens if t.type not in _COMMENTS and t.start[0] not in skipped]
    return hashlib.sha256("\0".join([*code, fields]).encode()).hexdigest()[:32]


#: Tokens at the start and end of an f-string in Python 3.12 and later; before, an f-string is one token.
_OPENS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")} - {None}
_CLOSES = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")} - {None}


def _formatted_strings_whole(text: str, tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """The tokens with each f-string as one token, as in Python before 3.12."""
    lines = text.splitlines(keepends=True)
    depth, start = 0, (0, 0)
    for token in tokens:
        if token.type in _OPENS:
            start = token.start if depth == 0 else start
            depth += 1
        elif token.type in _CLOSES:
            depth -= 1
            if depth == 0:
                (first, left), (last, right) = start, token.end
                spanned = "".join(lines[first - 1 : last])
                whole = spanned[left : len(spanned) - len(lines[last - 1]) + right]
                yield tokenize.TokenInfo(tokenize.STRING, whole, start, token.end, spanned)
        elif depth == 0:
            yield token


#: Tokens without effect.
_COMMENTS = {tokenize.COMMENT, tokenize.NL}

#: Tokens that delimit blocks, replaced by marks, since their text depends on the width of the indentation.
_MARKS = {tokenize.NEWLINE: "<newline>", tokenize.INDENT: "<indent>", tokenize.DEDENT: "<dedent>"}


def _lines_without_effect(module: ast.Module) -> set[int]:
    """Line numbers of docstrings, of the `check` function and of the script part."""
    without_effect: list[ast.stmt] = []
    for node in module.body:
        check = isinstance(node, ast.FunctionDef) and node.name == "check"
        if check or isinstance(node, ast.If | ast.Expr):
            without_effect.append(node)
        elif isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            without_effect.append(node.body[0])
    return {line for node in without_effect for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _wrapped(words: Iterable[str]) -> str:
    """Words of the header, continued below each other where they fill more than a line."""
    from tlxgen.codegen.line_breaks import WIDTH

    return f"\n{' ' * HEADER_INDENT}".join(textwrap.wrap(" ".join(words), WIDTH - HEADER_INDENT))


def emit(operator: Operator[Any], problem: Problem, config: Config) -> KernelSource:
    """Renders the config's template for the problem.

    Raises:
        jinja2.TemplateError: the template is broken, which is a bug of the template, not of the config.
    """
    from tlxgen.codegen import rendering  # imports jinja2, which a kernel emitted by an earlier process does without

    context = {
        "problem": problem,
        "config": config,
        "config_line": _wrapped(f"{name}={value}" for name, value in config.params.items()),
        "template_hash": rendering.template_hash(config.template),
        "version": __version__,
        **config.params,
        **operator.template_context(problem, config),
    }
    return KernelSource(operator.name, problem, config, rendering.render(config.template, context))
