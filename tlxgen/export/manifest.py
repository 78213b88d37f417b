"""`manifest.json` of an exported package: which file serves which problem, and what is known of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tlxgen.config import Config
from tlxgen.devices import DeviceKey

#: Of the file, read by `tlxgen.export.standalone`. A change that old readers would misread gets a new number.
FORMAT: Literal[1] = 1


class Provenance(BaseModel):
    """What a tuned row says of its measurement; times in microseconds."""

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

    key: str  #: of the tuned row that the problem has, or would have
    operator: str
    problem: dict[str, Any]
    label: str
    config: Config
    origin: str  #: as `tlxgen.runtime.selection.Origin`
    why: str  #: the whole account of the choice
    module: str  #: in the package's folder `kernels`
    code_hash: str
    needs_tlx: bool
    provenance: Provenance | None  #: of tuned rows


class Manifest(BaseModel):
    """All of a package. `capability` is what its kernels are for: elsewhere torch computes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    made_by: str  #: such as `tlxgen 0.1.0`
    device: DeviceKey
    capability: tuple[int, int]
    toolchain: str
    entries: tuple[Entry, ...]
