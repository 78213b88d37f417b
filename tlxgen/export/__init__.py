"""`tlxgen export`: writes a package of emitted kernels with a table and a small dispatcher, which needs no tlxgen."""

from __future__ import annotations

from tlxgen.export.package import why_not_exported, write_package

__all__ = ["why_not_exported", "write_package"]
