"""Generated mutants of every statement that synchronises are found, or are known to be harmless."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support import emitted
from tests.support.mutants import Mutant, mutants
from tlxgen.codegen.emit import KernelSource
from tlxgen.simulator.check import check

#: Mutants that change no result, reviewed one by one: pattern of their names → why they are harmless.
HARMLESS = {
    r"double: tlx\.(barrier_wait|async_descriptor_store_wait|async_load_wait_group)\(.*": "a second wait for the same passes at once",
    r"double: (tlx\.(local_store|fence)|tl\.store)\(.*": "the same once more, before any other role reads it",
    r"(drop: tlx\.fence\(\"async_shared\"\)|swap: tlx\.local_store\(q_tile.* / tlx\.fence.*|swap: tlx\.fence.* / last = .*)": "the compiler fences what is stored before a product reads it (ProxyFenceInsertion)",
    r"swap: (acc = tlx\.async_dot_wait\(0, acc\) \* inverse.* / out_ptrs = |tlx\.local_store\(staging.* / place = |tl\.store\(partial_ptrs.* / tl\.store\(partial_lse_ptr).*": "an address, or two stores, in another order",
    r"double: tlx\.async_load_commit_group\(.*": "an empty group in between makes the waits stricter, and slower",
    r"swap: \w+ = tlx\.alloc_barriers\(.* / .*": "allocations in another order",
    r"swap: tlx\.barrier_expect_bytes\(.* / tlx\.async_(descriptor_load|load)\(.*": "bytes may come before they are expected: the phase still lacks its arrival",
    r"swap: (\w+ = )?tlx\.async_(descriptor_load|load)\(.* / (\w+ = )?tlx\.async_(descriptor_load|load)\(.*": "two copies in another order",
    r"swap: tlx\.barrier_arrive\(empty.* / (left, right = halves|parts = halves|store_columns|offsets = ).*": "registers are independent of the release",
    r"swap: tlx\.named_barrier_arrive\(other_turn, 256\) / acc = tlx\.async_dot_wait\(0, acc\)": "the turn is handed over later: only slower",
    r"swap: tlx\.async_descriptor_store_wait\(0\) / tlx\.barrier_expect_bytes\(loaded, .*": "the barrier of the residual is independent of the store before",
    r"swap: (acc = )?tlx\.(async_load_wait_group|async_dot_wait)\(.* / tl\.debug_barrier\(\)": "the compiler puts a barrier between the wait and the next access by itself (Membar)",
    r"swap: acc = tlx\.async_dot_wait\(0, acc\) / tlx\.async_load_wait_group\(0\)": "two waits in another order",
    r"swap: .* / (q = tlx\.local_reshape|staging = (out|q)_tiles|q_stage, q_phase = next_stage).*": "a view, or a step of the ring, in another order",
    r"swap: release\([kv]_empty.* / (scores = masked|acc = acc \* factor|acc = rescaled|p, largest, total, factor = |tlx\.async_descriptor_store_wait).*": "registers and stores are independent of the release of keys and values",
    r"swap: release\(q_empty\[slot\]\) / tlx\.barrier_wait\(v_full.*": "Q has been read, and values are independent of its release",
    r"swap: release\(k_empty\[stage\]\) / tlx\.barrier_wait\(v_full\[stage\], phase\)": "keys that this consumer does not read are released later: only slower",
    r"swap: tlx\.async_descriptor_load\(k_desc.* / tlx\.barrier_wait\(v_empty.*": "keys are loaded later: only slower",
    r"swap: tlx\.barrier_wait\(k_full.* / tlx\.named_barrier_wait\(my_turn, 256\)": "two waits in another order",
    r"swap: tlx\.named_barrier_wait\(my_turn, 256\) / scores = tlx\.async_dot.*": "turns at the tensor cores only affect speed",
    r"swap: tlx\.named_barrier_arrive\(next_turn, 256\) / scores = tlx\.async_dot_wait\(1, scores\)": "the turn is handed over later: only slower",
    r"swap: tlx\.named_barrier_arrive\(next_turn, 256\) / tlx\.barrier_wait\(v_full.*": "the turn is handed over later: only slower",
    r"swap: acc = tlx\.async_dot_wait\(0, acc\) / release\(v_empty\[v_stage\]\)": "after a tile's last product, where the output goes through Q: the next values are loaded after the next Q, and so after this wait",
    r"swap: index = tl\.max\(tlx\.local_load\(next_tiles.* / tlx\.barrier_wait\(v_full.*": "the next tile is read one wait later, and its stage is released later still",
    r"(swap: tlx\.local_store\(next_tiles.* / tlx\.barrier_arrive\(next_known.*|(drop|swap): tlx\.barrier_wait\(next_known.*)": "the tile's first keys, expected after the store and waited for before the load, order them too; within the warps of one task only this barrier does",
    r"swap: (tlx\.async_descriptor_store_wait\(0\)|release\(v_empty\[v_stage\]\)) / rows_out = .*": "rows of the output are in registers still",
    r"swap: scores = tlx\.async_dot_wait\(1, scores\) / release\(k_empty\[stage\]\)": "the ring of values orders it: these keys are overwritten after the values that are released after this wait",
}  # fmt: skip


#: Variants of a template → earlier kernels: a mutant of a statement that they share is checked there.
VARIANTS = {
    emitted.COOPERATIVE_SPLIT.file_name: [emitted.COOPERATIVE],
    emitted.FLASH_DYNAMIC.file_name: [emitted.FLASH],
    emitted.VARLEN.file_name: [emitted.FLASH, emitted.FLASH_DYNAMIC],
    emitted.WEIGHT_GRADIENT.file_name: [emitted.GROUPED],
}


def own_mutants(source: KernelSource) -> list[Mutant]:
    """The mutants of a kernel that no earlier variant has."""
    elsewhere = {m.name for other in VARIANTS.get(source.file_name, []) for m in mutants(other.text)}
    return [m for m in mutants(source.text) if m.name not in elsewhere]


@pytest.mark.parametrize("source", emitted.SOURCES, ids=emitted.identify)
def test_mutant_is_found_or_known_to_be_harmless(source: KernelSource) -> None:
    made = own_mutants(source)
    survivors = [
        m.name for m in made if check(replace(source, text=m.text), 3, limits=emitted.LIMITS, stop_early=True).clean
    ]
    unknown = [name for name in survivors if not any(re.fullmatch(pattern, name) for pattern in HARMLESS)]
    assert not unknown
    assert len(survivors) < len(made)


def test_every_harmless_pattern_matches_a_mutant() -> None:
    names = [mutant.name for source in emitted.SOURCES for mutant in mutants(source.text)]
    unused = [pattern for pattern in HARMLESS if not any(re.fullmatch(pattern, name) for name in names)]
    assert not unused
