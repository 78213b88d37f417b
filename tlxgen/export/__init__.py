"""Kernels to take away: a package of emitted files with a table, a small dispatcher, and torch behind it."""

from __future__ import annotations

from tlxgen.export.package import why_not_exported, write_package

__all__ = ["why_not_exported", "write_package"]
