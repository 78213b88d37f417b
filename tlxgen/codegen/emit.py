"""Problem and Config → KernelSource: the text of one stand-alone kernel file.

Same input, same bytes out. Templates see settled values only: whatever Python can decide is decided by the operator's
`template_context`, and an undefined variable is an error.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
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
    """An emitted file: its text, and what it was emitted for."""

    operator: str
    problem: Problem
    config: Config
    text: str

    @cached_property
    def code_hash(self) -> str:
        """Hash of the code without comments, docstrings and self-check.

        Two sources with one hash compile to one kernel, so this says whether a stored measurement still
        speaks of the kernel that would be emitted now. Editing a comment changes nothing; editing a template, a macro
        or a helper of the generator does, as far as it reaches this kernel. Made of tokens, which every supported
        Python reads alike (the dump of a syntax tree differs between versions).
        """
        # Dtypes reach a kernel through its arguments, and do not show in the text.
        fields = self.problem.model_dump(exclude={*self.problem.sizes, *self.problem.extents})
        return _code_hash(_OF_ONE_SIZE.sub("", self.text), json.dumps(fields, sort_keys=True))

    @property
    def file_name(self) -> str:
        """A name that no other text has, so that no two variants share a module or a stale byte-code file."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:16]
        return f"{self.config.template}_{digest}.py"


#: The two places of a file that name sizes and nothing else: a line of its docstring, the defaults of its self-check.
_OF_ONE_SIZE = re.compile(r"^    problem   .*$|(?<=^def check\().*(?=\):$)", re.MULTILINE)


@lru_cache(maxsize=256)  # reading tokens takes ten times as long as emitting; sizes of one kernel share an entry
def _code_hash(text: str, fields: str) -> str:
    skipped = _lines_without_effect(ast.parse(text))
    tokens = _formatted_strings_whole(text, tokenize.generate_tokens(io.StringIO(text).readline))
    code = [_MARKS.get(t.type, t.string) for t in tokens if t.type not in _COMMENTS and t.start[0] not in skipped]
    return hashlib.sha256("\0".join([*code, fields]).encode()).hexdigest()[:32]


#: Where Python 3.12 and later begin and end a formatted string; earlier ones read it as a single token.
_OPENS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")} - {None}
_CLOSES = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")} - {None}


def _formatted_strings_whole(text: str, tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """The tokens with each formatted string as one, so that every Python finds the same."""
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


#: Tokens that do nothing.
_COMMENTS = {tokenize.COMMENT, tokenize.NL}

#: Tokens that say which block a statement belongs to, however wide its indentation.
_MARKS = {tokenize.NEWLINE: "<newline>", tokenize.INDENT: "<indent>", tokenize.DEDENT: "<dedent>"}


def _lines_without_effect(module: ast.Module) -> set[int]:
    """Lines of docstrings, of the `check` function and of the script part."""
    without_effect: list[ast.stmt] = []
    for node in module.body:
        check = isinstance(node, ast.FunctionDef) and node.name == "check"
        if check or isinstance(node, ast.If | ast.Expr):
            without_effect.append(node)
        elif isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            without_effect.append(node.body[0])
    return {line for node in without_effect for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def emit(operator: Operator[Any], problem: Problem, config: Config) -> KernelSource:
    """Renders the config's template for the problem.

    Raises:
        jinja2.TemplateError: the template is broken, which is a bug of the template, not of the config.
    """
    from tlxgen.codegen import rendering  # brings jinja2, of which a kernel that was served before has no need

    context = {
        "problem": problem,
        "config": config,
        "config_line": " ".join(f"{name}={value}" for name, value in config.params.items()),
        "template_hash": rendering.template_hash(config.template),
        "version": __version__,
        **config.params,
        **operator.template_context(problem, config),
    }
    return KernelSource(operator.name, problem, config, rendering.render(config.template, context))
