"""Jinja2 rendering of templates, and hashes of templates with all that they include."""

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
from tlxgen.codegen import line_breaks


def render(template: str, context: dict[str, Any]) -> str:
    """The template's text for these values.

    Raises:
        jinja2.TemplateError: the template is broken, or uses an undefined variable.
    """
    text = _environment(paths.TEMPLATES).get_template(_name(paths.TEMPLATES, template)).render(context)
    return line_breaks.broken(text)


def template_hash(template: str, root: Path | None = None) -> str:
    """Hash (12 hex digits) of a template and everything that it includes or imports."""
    root = root or paths.TEMPLATES
    environment = _environment(root)
    digest = hashlib.sha256()
    for name in sorted(_closure(environment, _name(root, template))):
        digest.update(name.encode() + b"\0" + _text(environment, name).encode() + b"\0")
    return digest.hexdigest()[:12]


def _name(root: Path, template: str) -> str:
    """Path of a template's file relative to the root, such as `gemm/gemm_vanilla.py.j2`."""
    path = paths.in_operator_folder(root, f"{template}.py.j2")
    if path is None:
        raise jinja2.TemplateNotFound(f"{template}.py.j2")
    return path.relative_to(root).as_posix()


#: References of a template to others; a regex, since Jinja's parser would parse every file twice.
_REFERENCE = re.compile(r"{%-?\s*(?:import|from|include|extends)\s+['\"]([^'\"]+)['\"]")


def _closure(environment: jinja2.Environment, name: str) -> set[str]:
    """Names of a template and of all that it refers to, directly or indirectly."""
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
    """Jinja's byte-code cache in the user's cache directory; compiling templates is most of a cold start."""

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Does nothing if the directory cannot be written."""
        with contextlib.suppress(OSError):
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            super().dump_bytecode(bucket)

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """Does nothing if the file cannot be read."""
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
