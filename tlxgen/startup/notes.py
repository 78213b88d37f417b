"""Notes: small files in the user's cache with results of earlier processes.

A note's name is a hash of everything that its content depends on, so no note is out of date. A missing, damaged or
unreadable note is a miss, and a note that cannot be written is skipped silently: notes only save time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlxgen import paths


def recall(kind: str, parts: Sequence[str]) -> dict[str, Any] | None:
    """The content of the note for these parts, or None."""
    try:
        note = json.loads(_place(kind, parts).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(note, dict) or not isinstance(content := note.get("content"), dict):
        return None
    return content if note.get("sum") == _sum(kind, parts, content) else None


def remember(kind: str, parts: Sequence[str], content: dict[str, Any]) -> None:
    """Writes the note, replacing an existing one."""
    with contextlib.suppress(OSError):
        note = {"content": content, "sum": _sum(kind, parts, content)}
        paths.write_atomically(_place(kind, parts), json.dumps(note))


def _sum(kind: str, parts: Sequence[str], content: dict[str, Any]) -> str:
    """A checksum of content and parts, which reveals flipped bits and notes of other parts."""
    told = json.dumps([kind, list(parts), content], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _place(kind: str, parts: Sequence[str]) -> Path:
    own = paths.user_cache_dir()
    if not own.is_absolute():  # it would be in whatever directory is current
        raise OSError("nothing names a home")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return own / kind / f"{digest}.json"
