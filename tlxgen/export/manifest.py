"""`manifest.json` of an exported package: the kernel file of each problem, and where its config comes from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tlxgen.config import Config
from tlxgen.devices import DeviceKey

#: Version of the file format that `tlxgen.export.standalone` reads.
FORMAT: Literal[1] = 1


class Provenance(BaseModel):
    """The measurement of a tuned row; times in microseconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time_us: float
    spread_us: float
    peer: str | None
    peer_us: float | None
    error: float | None
    error_peer: float | None
    protocol: str
    created: str
    versions: dict[str, str]


class Entry(BaseModel):
    """One problem's kernel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str  #: key id of the problem's row
    operator: str
    problem: dict[str, Any]
    label: str
    config: Config
    origin: str  #: as `tlxgen.runtime.selection.Origin`
    why: str  #: `Choice.explain()`
    module: str  #: module in the package's folder `kernels`
    code_hash: str
    needs_tlx: bool
    provenance: Provenance | None  #: of tuned rows only


class Manifest(BaseModel):
    """The table of a package. On GPUs of another `capability` torch computes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    made_by: str  #: such as `tlxgen 0.1.0`
    device: DeviceKey
    capability: tuple[int, int]
    toolchain: str
    entries: tuple[Entry, ...]
