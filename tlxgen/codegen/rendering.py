"""Templates and values → text, by jinja2, which whoever finds an emitted file on disk does not import."""

from __future__ import annotations

import contextlib
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.bccache

from tlxgen import paths


def render(template: str, context: dict[str, Any]) -> str:
    """The template's text for these values.

    Raises:
        jinja2.TemplateError: the template is broken, or wants a value that there is not.
    """
    return _environment(paths.TEMPLATES).get_template(_name(paths.TEMPLATES, template)).render(context)


def template_hash(template: str, root: Path | None = None) -> str:
    """Twelve hex digits over a template and everything that it includes or imports."""
    root = root or paths.TEMPLATES
    environment = _environment(root)
    digest = hashlib.sha256()
    for name in sorted(_closure(environment, _name(root, template))):
        digest.update(name.encode() + b"\0" + _text(environment, name).encode() + b"\0")
    return digest.hexdigest()[:12]


def _name(root: Path, template: str) -> str:
    """The template's file as Jinja names it: relative to the root, such as `gemm/gemm_vanilla.py.j2`."""
    path = paths.in_operator_folder(root, f"{template}.py.j2")
    if path is None:
        raise jinja2.TemplateNotFound(f"{template}.py.j2")
    return path.relative_to(root).as_posix()


#: What one template names of another. Jinja's own parser would tell as well, at the price of parsing everything twice.
_REFERENCE = re.compile(r"{%-?\s*(?:import|from|include|extends)\s+['\"]([^'\"]+)['\"]")


def _closure(environment: jinja2.Environment, name: str) -> set[str]:
    """A template's name and those of all that it refers to, directly or not."""
    found: set[str] = set()
    pending = [name]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending += _REFERENCE.findall(_text(environment, current))
    return found


def _text(environment: jinja2.Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


class _CompiledTemplates(jinja2.FileSystemBytecodeCache):
    """Templates as Python's byte code in the user's cache, by content: compiling them is most of a cold start."""

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Quietly keeps nothing where nothing can be written."""
        with contextlib.suppress(OSError):
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            super().dump_bytecode(bucket)

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Nothing where nothing can be read."""
        with contextlib.suppress(OSError):
            super().load_bytecode(bucket)


@cache
def _environment(root: Path) -> jinja2.Environment:
    return jinja2.Environment(
        bytecode_cache=_CompiledTemplates(str(paths.user_cache_dir() / "templates")),
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - Python source, not HTML
    )
