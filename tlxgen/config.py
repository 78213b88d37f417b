"""`Config`: a template with a value for each of its parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, field_validator

from tlxgen.errors import InvalidConfigError

Value: TypeAlias = bool | int | str


class Config(BaseModel):
    """A template and its parameters, frozen and hashable by content.

    >>> Config(template="vector_add_vanilla", params={"block": 1024}).short
    'vector_add_vanilla block=1024'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str
    params: dict[str, Value]

    @field_validator("params")
    @classmethod
    def _in_order(cls, params: dict[str, Value]) -> dict[str, Value]:
        """Sorted by name, so that equal configs print and emit the same."""
        return dict(sorted(params.items()))

    @property
    def id(self) -> str:
        """Hash of the content (16 hex digits), equal for equal configs in every process."""
        canonical = json.dumps([self.template, self.params], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def short(self) -> str:
        """One line of text: the template and `name=value` pairs."""
        return " ".join([self.template, *(f"{k}={v}" for k, v in self.params.items())])

    @classmethod
    def from_short(cls, short: str) -> Config:
        """The config whose `short` is this line.

        Raises:
            InvalidConfigError: a word is no `name=value`.
        """
        template, *pairs = short.split() or [""]
        return cls(template=template, params=parse_params(pairs))

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and other.id == self.id


def parse_params(pairs: Iterable[str]) -> dict[str, Value]:
    """Parameters from words like `block_m=64`; whole numbers become integers.

    Raises:
        InvalidConfigError: a word is not `name=value`.
    """
    params: dict[str, Value] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InvalidConfigError(f"{pair!r} is not name=value")
        params[name] = _value(text)
    return params


def _value(text: str) -> Value:
    try:
        return int(text)
    except ValueError:
        return text
