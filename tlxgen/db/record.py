"""Rows of the database and their keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tlxgen.config import Config
from tlxgen.devices import DeviceKey
from tlxgen.problem import Problem
from tlxgen.space import absent
from tlxgen.toolchain import toolchain

#: Version of the row format. A row of another version is migrated when the database is opened.
SCHEMA_VERSION = 1

Origin = Literal["measured", "predicted"]

#: Numbers that fit an integer column of the database.
Positive = Annotated[float, Field(gt=0, lt=1e300, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, lt=1e300, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]

#: A stored config: one that is older than a parameter of its search space gets the parameter's former value.
KeptConfig = Annotated[Config, AfterValidator(absent.completed)]


class TuningKey(BaseModel):
    """The key of a row; `tlxgen.db.record.tuning_key` makes it for tuner and run time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator: str
    problem: dict[str, Any]
    device: DeviceKey
    toolchain: str  #: such as `fbtriton 3.7.4, ptxas 12.9.86`

    @property
    def id(self) -> str:
        """Thirty-two hex digits, equal for equal keys in every process."""
        canonical = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]


class TunedRecord(BaseModel):
    """The best config known for a key, with the evidence.

    `source_hash` is the hash of the kernel's code as it was emitted for the measurement (`KernelSource.code_hash`): a
    row whose config emits other code today is stale, whatever caused the change (template, macro, helper).
    Times are microseconds of one kernel execution.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: TuningKey
    config: KeptConfig
    origin: Origin
    source_hash: str
    time_us: Positive
    spread_us: NotNegative = 0.0  #: interquartile range of the rounds
    peer: str | None = None  #: the library timed in the same run, such as `cublas`
    peer_us: Positive | None = None
    error: NotNegative | None = None  #: relative norm against the float64 reference
    error_peer: NotNegative | None = None
    protocol: str  #: version of the timing protocol; `model-…` for predicted rows
    versions: dict[str, str] = Field(default_factory=dict)  #: torch, cuda, driver, tlxgen
    trials: Count = 0
    created: datetime = Field(default_factory=lambda: datetime.now(timezone.utc).replace(microsecond=0))

    @model_validator(mode="after")
    def _printable(self) -> TunedRecord:
        """Rows may come from other people and are listed on terminals, which control characters would affect."""
        for text in _texts(self.model_dump()):
            if not text.isprintable():
                raise ValueError(f"{text[:80]!r} holds characters that cannot be printed")
        return self

    @property
    def ratio(self) -> float | None:
        """Peer time over kernel time: above 1, the kernel is faster."""
        return None if self.peer_us is None else self.peer_us / self.time_us


def _texts(value: Any) -> Iterator[str]:
    """All strings in nested dicts, lists and tuples, names among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts(name)
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


TrialStatus = Literal[
    "ok",
    "out_of_resources",
    "ptxas",
    "compiler_error",
    "compiler_crash",
    "timeout",
    "killed",
    "rejected",
    "unsafe",
    "launch_failed",
    "out_of_memory",
    "gpu_lost",
    "wrong_result",
    "unstable_result",
    "hang",
]


class Trial(BaseModel):
    """One config tried for one key: its time, or the class of its failure."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)  # a launch reads none

    config: KeptConfig
    source_hash: str
    status: TrialStatus
    time_us: Positive | None = None
    peer_us: Positive | None = None  #: the library's in that run
    protocol: str
    message: str = ""
    created: datetime = Field(default_factory=lambda: datetime.now(timezone.utc).replace(microsecond=0))


def tuning_key(problem: Problem, device: DeviceKey) -> TuningKey:
    """The key of a problem on a GPU under the installed toolchain."""
    return TuningKey(operator=problem.operator, problem=problem.model_dump(), device=device, toolchain=toolchain())
