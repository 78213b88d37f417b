"""Small files in the user's cache that save a new process the work of an old one.

A note lies under a hash of all that decides what it says, so that none is ever out of date. One that is missing,
damaged or cannot be read is a miss, and nothing is said where none can be written: what a note saves is time.
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
    """What was noted under these parts."""
    try:
        note = json.loads(_place(kind, parts).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(note, dict) or not isinstance(content := note.get("content"), dict):
        return None
    return content if note.get("sum") == _sum(kind, parts, content) else None


def remember(kind: str, parts: Sequence[str], content: dict[str, Any]) -> None:
    """Notes it, in place of what is there."""
    with contextlib.suppress(OSError):
        note = {"content": content, "sum": _sum(kind, parts, content)}
        paths.write_atomically(_place(kind, parts), json.dumps(note))


def _sum(kind: str, parts: Sequence[str], content: dict[str, Any]) -> str:
    """Of what is said, and what it is said of: a flipped bit shows, and so does another's note."""
    told = json.dumps([kind, list(parts), content], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _place(kind: str, parts: Sequence[str]) -> Path:
    own = paths.user_cache_dir()
    if not own.is_absolute():  # it would be in whatever directory is current
        raise OSError("nothing names a home")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return own / kind / f"{digest}.json"
