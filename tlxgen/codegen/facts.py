"""Facts of a compiled kernel: registers, spills, shared memory, counts of instructions; and which are unacceptable."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tlxgen import toolchain

#: Fact → opcodes of the machine code that it counts.
_COUNTED = {
    "hgmma": ("HGMMA", "QGMMA"),  # wgmma of 16 and 32 bits, and of 8
    "tma_loads": ("UTMALDG", "UBLKCP"),
    "tma_stores": ("UTMASTG",),
    "setmaxnreg": ("USETMAXREG",),
    "stmatrix": ("STSM",),
    "local_loads": ("LDL",),
    "local_stores": ("STL",),
}

#: ptxas warnings of a slow kernel: setmaxnreg ignored (C7507, C7508), wgmma serialised (C7510 to C7514).
_WARNING = re.compile(r"\b(C75\d\d)\b|(wgmma[^\n]*serialized)|(setmaxnreg[^\n]*ignored)")


class Facts(BaseModel):
    """Facts of one cubin; instructions are counted in the code, not as executed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    registers: int  #: per thread, as ptxas allocated them at entry
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    hgmma: int
    tma_loads: int
    tma_stores: int
    setmaxnreg: int
    stmatrix: int
    local_loads: int
    local_stores: int
    loop_conversions: int  #: layout conversions inside a loop that also multiplies
    warnings: tuple[str, ...] = ()


def read(cubin: bytes, ttgir: str, shared_bytes: int, ptxas_log: str) -> Facts:
    """Facts from the machine code, Triton's GPU IR and the output of `ptxas -v`."""
    counts = _opcodes(cubin)
    return Facts(
        registers=_number(r"Used (\d+) registers", ptxas_log),
        spill_bytes=_number(r"(\d+) bytes spill stores", ptxas_log),
        stack_bytes=_number(r"(\d+) bytes stack frame", ptxas_log),
        shared_bytes=shared_bytes,
        loop_conversions=loop_conversions(ttgir),
        warnings=tuple(sorted({match.group(0) for match in _WARNING.finditer(ptxas_log)})),
        **{fact: sum(counts[opcode] for opcode in opcodes) for fact, opcodes in _COUNTED.items()},
    )


def why_rejected(
    facts: Facts, *, wants_setmaxnreg: bool, wants_wgmma: bool, allowed_spill_bytes: int = 0
) -> str | None:
    """Why a binary is rejected without being timed, or None."""
    if facts.spill_bytes > allowed_spill_bytes or (facts.local_loads + facts.local_stores and not allowed_spill_bytes):
        return f"spills {facts.spill_bytes} bytes ({facts.local_loads} LDL, {facts.local_stores} STL)"
    if facts.warnings and wants_wgmma:  # plain Triton's pipeline is the compiler's choice
        return f"ptxas warns: {', '.join(facts.warnings)}"
    if wants_setmaxnreg and not facts.setmaxnreg:
        return "registers were asked for and the compiler dropped them: no setmaxnreg in the machine code"
    if wants_wgmma and not facts.hgmma:
        return "no wgmma in the machine code"
    if wants_wgmma and facts.loop_conversions:
        return f"{facts.loop_conversions} layout conversion(s) of a whole tile in the main loop"
    return None


def _opcodes(cubin: bytes) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(toolchain.binary("cuobjdump")), "-sass", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]+)", text, re.MULTILINE))


def _number(pattern: str, text: str) -> int:
    """The largest match, since a log may cover several functions; 0 if there is none."""
    return max((int(value) for value in re.findall(pattern, text)), default=0)


@dataclass
class _Loop:
    """A loop of the IR being parsed."""

    outside: int  # depth of braces around it
    dots: int = 0
    conversions: int = 0
    nested: bool = False  # whether an inner loop multiplies, so that this is not the main loop


#: Rows by columns, and the layouts before and after.
_CONVERSION = re.compile(r"ttg\.convert_layout.*: tensor<\d+x(\d+)x\w+, (.*?)> -> tensor<\w+, (.*)>")
_LEAST_COLUMNS = 16  # narrower tiles are a handful of registers


def _moves_a_tile(line: str) -> bool:
    """Whether a line of the IR converts a tile's layout through shared memory.

    A conversion from a tensor core's result to its first operand stays in registers.
    """
    match = _CONVERSION.search(line)
    if match is None or int(match.group(1)) < _LEAST_COLUMNS:
        return False
    before, after = match.group(2), match.group(3)
    return not (before.startswith("#mma") and after.startswith(("#mma", "#ttg.dot_op<{opIdx = 0")))


def loop_conversions(ttgir: str) -> int:
    """Number of `convert_layout` of whole tiles, through shared memory, in the innermost loops that multiply.

    The IR is parsed line by line; a stack of braces tells which loop a line belongs to.
    """
    total = 0
    depth = 0
    loops: list[_Loop] = []
    for line in ttgir.splitlines():
        if loops:
            loops[-1].dots += "warp_group_dot" in line and "warp_group_dot_wait" not in line
            loops[-1].conversions += _moves_a_tile(line)
        if "scf.for" in line or "scf.while" in line:
            loops.append(_Loop(depth))
        depth += line.count("{") - line.count("}")
        while loops and depth <= loops[-1].outside:
            loop = loops.pop()
            if loop.dots and not loop.nested:
                total += loop.conversions
            if loops:
                loops[-1].nested |= loop.nested or loop.dots > 0
    return total
