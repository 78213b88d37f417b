"""Every planted bug is found, with the right kind of finding.

Bugs are planted by editing the code of emitted kernels. Each must be found on the small problems that a check runs,
under every scheduling policy.
"""

from __future__ import annotations

import io
import tokenize
from dataclasses import dataclass, replace
from unittest import mock

import pytest

from tests.support import emitted
from tests.support.emitted import (
    COOPERATIVE,
    COOPERATIVE_SPLIT,
    CP_ASYNC,
    DECODE,
    FLASH,
    FLASH_DYNAMIC,
    FLASH_SPLIT,
    GROUPED,
    LIMITS,
    PINGPONG,
    RESIDUAL,
    VARLEN,
    VECTOR,
    WEIGHT_GRADIENT,
)
from tlxgen import ops
from tlxgen.codegen import line_breaks
from tlxgen.codegen.emit import KernelSource, emit
from tlxgen.simulator.check import check


@dataclass(frozen=True)
class Bug:
    """A bug: the code that it replaces, and the kinds of finding of which one must occur."""

    name: str
    old: str
    new: str
    kinds: frozenset[str]
    count: int = -1  #: occurrences that change; all of them by default
    also: tuple[str, str] = ("", "")  #: a second replacement

    def plant(self, source: KernelSource) -> KernelSource:
        with mock.patch.object(
            line_breaks, "WIDTH", 10_000
        ):  # calls on one line each, wherever a file would break them
            whole = without_comments(emit(ops.get(source.operator), source.problem, source.config).text)
        assert self.old in whole, f"{self.name}: {self.old!r} is not in {source.config.template}"
        text = whole.replace(self.old, self.new, self.count)
        return replace(source, text=text.replace(*self.also, 1) if self.also[0] else text)


def without_comments(text: str) -> str:
    """The code without comments and the lines that they fill, so that bugs are planted in code alone."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() or "#"
    return "\n".join(line for line in lines if line != "#") + "\n"


def bug(name: str, old: str, new: str, kinds: str, count: int = -1, also: tuple[str, str] = ("", "")) -> Bug:
    return Bug(name, old, new, frozenset(kinds.split()), count, also)


#: What both TMA kernels of GEMM have in common.
RING_BUGS = [
    bug("the consumer waits for the other phase", "barrier_wait(full[stage], phase)", "barrier_wait(full[stage], phase ^ 1)", "data_race early_release unwritten_shared"),
    bug("the producer waits for the other phase", "barrier_wait(empty[stage], phase)", "barrier_wait(empty[stage], phase ^ 1)", "deadlock"),
    bug("the producer never waits", "tlx.barrier_wait(empty[stage], phase)", "pass", "early_release barrier_reuse"),
    bug("the consumer never waits", "tlx.barrier_wait(full[stage], phase)", "pass", "data_race"),
    bug("the first release is dropped", "tlx.barrier_arrive(empty[previous])", "pass", "deadlock", 1),
    bug("all releases are dropped", "tlx.barrier_arrive(empty[previous])", "pass", "deadlock"),
    bug("the release comes before the product's wait", "async_dot_wait(1, acc)", "async_dot_wait(2, acc)", "early_release"),
    bug("a stage is released that is still read", "barrier_arrive(empty[previous])", "barrier_arrive(empty[stage])", "early_release barrier_reuse deadlock"),
    bug("too many arrivals are counted", "empty = tlx.alloc_barriers(NUM_STAGES, arrive_count=", "empty = tlx.alloc_barriers(NUM_STAGES, arrive_count=1 + ", "deadlock"),
    bug("full takes an arrival more", "full = tlx.alloc_barriers(NUM_STAGES, arrive_count=1)", "full = tlx.alloc_barriers(NUM_STAGES, arrive_count=2)", "deadlock"),
    bug("the last products are not waited for", "acc = tlx.async_dot_wait(0, acc)", "acc = tlx.async_dot_wait(1, acc)", "early_accumulator"),
    bug("the producer's ring is one stage short", "next_stage(stage, phase, NUM_STAGES)", "next_stage(stage, phase, NUM_STAGES - 1)", "wrong_result data_race early_release deadlock barrier_reuse", 1),
    bug("the phase never flips", "tl.where(wraps, phase ^ 1, phase)", "phase", "deadlock data_race barrier_reuse"),
    bug("the producer stops one step early", "for k in range(0, K, BLOCK_K):", "for k in range(0, K - BLOCK_K, BLOCK_K):", "roles_out_of_step deadlock"),
    bug("the producer loads one step more", "for k in range(0, K, BLOCK_K):", "for k in range(0, K + BLOCK_K, BLOCK_K):", "roles_out_of_step deadlock data_race wrong_result"),
    bug("the consumer stops one step early", "for _ in range(BLOCK_K, K, BLOCK_K):", "for _ in range(BLOCK_K, K - BLOCK_K, BLOCK_K):", "roles_out_of_step deadlock"),
    bug("bytes are expected after the copies", "tlx.barrier_expect_bytes(full[stage], ", "tlx.barrier_wait(full[stage], phase ^ 1); tlx.barrier_expect_bytes(full[stage], ", "deadlock"),
    bug("A is loaded a row too far", "[row, k]", "[row + 1, k]", "wrong_result"),
    bug("the fence is missing", 'tlx.fence("async_shared")', "pass", "missing_fence"),
    bug("the staging tile is reused at once", "\n    tlx.async_descriptor_store_wait(0)\n", "\n", "early_release"),
    bug("stores are left behind", "            tlx.async_descriptor_store_wait(0)\n\n\n", "\n\n", "unfinished_at_exit"),
    bug("the tile walk differs", "range(tl.program_id(0), num_tiles, tl.num_programs(0))", "range(tl.program_id(0), num_tiles - 1, tl.num_programs(0))", "deadlock roles_out_of_step wrong_result", 1),
    bug("too many stages for shared memory", "NUM_STAGES = ", "NUM_STAGES = 8 + ", "out_of_budget", 1),
    bug("a tensor is captured", "    with tlx.async_tasks():\n", "    tensor = tl.arange(0, 64)\n    with tlx.async_tasks():\n", "capture", also=("            stage = 0\n", "            stage = 0 * tensor.shape[0]\n")),
]  # fmt: skip

PINGPONG_BUGS = [
    bug("the ring is one stage short", "wraps = stage == NUM_STAGES - 1", "wraps = stage == NUM_STAGES - 2", "wrong_result data_race deadlock barrier_reuse unfinished_at_exit"),
    bug("the turn is never handed over", "tlx.named_barrier_arrive(other_turn, 256)\n                acc = ", "acc = ", "deadlock"),
    bug("nobody goes first", "tlx.named_barrier_arrive(other_turn, 256)\n            step = ", "pass\n            step = ", "deadlock"),
    bug("the turn takes 128 threads", "named_barrier_wait(my_turn, 256)", "named_barrier_wait(my_turn, 128)", "wrong_thread_count"),
    bug("half a warp more", "(my_turn, 256)", "(my_turn, 272)", "wrong_thread_count"),
    bug("both turns have one number", "my_turn: tl.constexpr = 9 + consumer", "my_turn: tl.constexpr = 9", "barrier_reuse deadlock wrong_thread_count"),
    bug("a number of the compiler's", "9 + consumer", "2 + consumer", "out_of_budget deadlock"),
    bug("one consumer starts at the wrong step", "step = consumer * k_steps", "step = consumer * (k_steps + 1)", "data_race deadlock barrier_reuse wrong_result"),
    bug("expects too few bytes", "expect_bytes(full[stage], ", "expect_bytes(full[stage], -8192 + ", "wrong_byte_count"),
    bug("expects too many bytes", "expect_bytes(full[stage], ", "expect_bytes(full[stage], 16 + ", "wrong_byte_count"),
]  # fmt: skip

COOPERATIVE_BUGS = [
    bug("expects the bytes of B alone", "expect_bytes(full[stage], ", "expect_bytes(full[stage], -16384 + ", "wrong_byte_count"),
    bug("expects too many bytes", "expect_bytes(full[stage], ", "expect_bytes(full[stage], 16 + ", "wrong_byte_count"),
    bug("one consumer's release is enough", "arrive_count=2", "arrive_count=1", "barrier_reuse"),
    bug("both consumers read one half of A", "a_tiles[stage * 2 + consumer]", "a_tiles[stage * 2]", "wrong_result"),
    bug("only one consumer releases", "tlx.barrier_arrive(empty[previous])", "if consumer == 0: tlx.barrier_arrive(empty[previous])", "deadlock"),
    bug("both consumers share a staging tile", "c_tiles[consumer]", "c_tiles[0]", "data_race early_release"),
]  # fmt: skip

CP_ASYNC_BUGS = [
    bug("a group is waited for too loosely", "async_load_wait_group(NUM_STAGES - 2)", "async_load_wait_group(NUM_STAGES - 1)", "data_race"),
    bug("no group is waited for", "tlx.async_load_wait_group(NUM_STAGES - 2)", "pass", "data_race"),
    bug("copies beyond K are left behind", "    tlx.async_load_wait_group(0)\n", "", "unfinished_at_exit"),
    bug("refills while it is read", "async_dot_wait(1, acc)", "async_dot_wait(2, acc)", "early_release"),
    bug("the commit is missing", "        tlx.async_load_commit_group([a_token, b_token])\n        a_ptrs += a_step\n        b_ptrs += b_step\n    acc", "        a_ptrs += a_step\n        b_ptrs += b_step\n    acc", "data_race"),
    bug("refills the stage that is next", "refill = (step + NUM_STAGES - 1) % NUM_STAGES", "refill = (step + NUM_STAGES) % NUM_STAGES", "early_release wrong_result data_race"),
    bug("the K mask is missing", "K - k_ahead", "K", "wrong_result out_of_bounds"),
    bug("the products are not waited for", "acc = tlx.async_dot_wait(0, acc)", "acc = tlx.async_dot_wait(1, acc)", "early_accumulator"),
    bug("one K step fewer", "range(0, tl.cdiv(K, BLOCK_K))", "range(0, tl.cdiv(K, BLOCK_K) - 1)", "wrong_result unwritten_shared"),
    bug("more stages than shared memory", "NUM_STAGES = ", "NUM_STAGES = 32 + ", "out_of_budget", 1),
    bug("A and B in each other's place", "tlx.async_dot(a_tiles[stage], b_tiles[stage], acc)", "tlx.async_dot(b_tiles[stage], a_tiles[stage], acc)", "wrong_result"),
    bug("the ring starts one stage late", "for ahead in tl.static_range(NUM_STAGES - 1):", "for ahead in tl.static_range(NUM_STAGES - 2):", "wrong_result unwritten_shared data_race"),
]  # fmt: skip

RESIDUAL_BUGS = [
    bug("the residual is not waited for", "tlx.barrier_wait(loaded, phase)", "pass", "data_race"),
    bug("its phase never flips", "residual_phase ^= 1", "pass", "data_race barrier_reuse"),
    bug("too few bytes of it", "barrier_expect_bytes(loaded, ", "barrier_expect_bytes(loaded, -16 + ", "deadlock wrong_byte_count"),
]  # fmt: skip

VECTOR_BUGS = [
    bug("the adder does not wait", "tlx.barrier_wait(full[stage], phase)", "pass", "data_race"),
    bug("the loader does not wait", "tlx.barrier_wait(empty[stage], phase)", "pass", "data_race barrier_reuse"),
    bug("the adder releases before it reads", "                total = tlx.local_load(x_blocks[stage]) + tlx.local_load(y_blocks[stage])\n                tlx.barrier_arrive(empty[stage])\n", "                tlx.barrier_arrive(empty[stage])\n                total = tlx.local_load(x_blocks[stage]) + tlx.local_load(y_blocks[stage])\n", "data_race"),
    bug("the release is dropped", "tlx.barrier_arrive(empty[stage])", "pass", "deadlock"),
    bug("the adder's phase is inverted", "barrier_wait(full[stage], phase)", "barrier_wait(full[stage], phase ^ 1)", "data_race"),
    bug("the loader's phase is inverted", "barrier_wait(empty[stage], phase)", "barrier_wait(empty[stage], phase ^ 1)", "deadlock"),
    bug("half of the bytes are expected", "barrier_expect_bytes(full[stage], 2 * BLOCK * 2)", "barrier_expect_bytes(full[stage], BLOCK * 2)", "wrong_byte_count"),
    bug("more bytes than come", "barrier_expect_bytes(full[stage], 2 * BLOCK * 2)", "barrier_expect_bytes(full[stage], 4 * BLOCK * 2)", "wrong_byte_count"),
    bug("arrivals of two", "empty = tlx.alloc_barriers(NUM_STAGES, arrive_count=1)", "empty = tlx.alloc_barriers(NUM_STAGES, arrive_count=2)", "deadlock"),
    bug("the phase never flips", "tl.where(wraps, phase ^ 1, phase)", "phase", "deadlock data_race barrier_reuse"),
    bug("the loader walks one block more", "range(tl.program_id(0), whole_blocks, tl.num_programs(0)):\n                start", "range(tl.program_id(0), whole_blocks + 1, tl.num_programs(0)):\n                start", "roles_out_of_step out_of_bounds unfinished_at_exit"),
    bug("the loader walks one block fewer", "range(tl.program_id(0), whole_blocks, tl.num_programs(0)):\n                start", "range(tl.program_id(0), whole_blocks - 1, tl.num_programs(0)):\n                start", "roles_out_of_step deadlock"),
    bug("x is added twice", "tlx.local_load(y_blocks[stage])", "tlx.local_load(x_blocks[stage])", "wrong_result"),
    bug("the tail has no mask", "total, mask=inside", "total", "out_of_bounds"),
]  # fmt: skip

FLASH_BUGS = [
    bug("Q is not waited for", "tlx.barrier_wait(q_full[slot], q_phase)", "pass", "data_race early_release unwritten_shared"),
    bug("keys are not waited for", "tlx.barrier_wait(k_full[stage], phase)", "pass", "data_race early_release unwritten_shared"),
    bug("values are not waited for", "tlx.barrier_wait(v_full[v_stage], v_phase)", "pass", "data_race early_release unwritten_shared"),
    bug("Q is not released", "release(q_empty[slot])", "pass", "deadlock"),
    bug("keys are not released", "release(k_empty[stage])", "pass", "deadlock"),
    bug("values are not released", "release(v_empty[v_stage])", "pass", "deadlock"),
    bug("Q is released before its last product", "                release(q_empty[slot])\n", "", "early_release barrier_reuse data_race", also=("q = tlx.local_reshape(q_tiles[slot], [WG_M, HEAD])", "q = tlx.local_reshape(q_tiles[slot], [WG_M, HEAD]); release(q_empty[slot])")),
    bug("keys are released under way", "scores = tlx.async_dot_wait(1, scores)", "scores = tlx.async_dot_wait(2, scores)", "early_accumulator"),
    bug("values are released under way", "acc = tlx.async_dot_wait(0, acc)", "acc = tlx.async_dot_wait(1, acc)", "early_accumulator early_release"),
    bug("every thread arrives as a warp", "pred=tlx.thread_id(0) % 32 == 0", "pred=tlx.thread_id(0) % 16 == 0", "barrier_reuse"),
    bug("one warp does not arrive", "% 32 == 0", "% 64 == 0", "deadlock"),
    bug("one consumer is enough", "num_arrivals=CONSUMERS", "num_arrivals=1", "barrier_reuse"),
    bug("the producer's Q phase is inverted", "q_phase = 1\n", "q_phase = 0\n", "deadlock"),
    bug("the producer skips the first block", "range(end - 1, first - 1, -1)", "range(end - 1, first, -1)", "deadlock roles_out_of_step"),
    bug("the consumer skips the first block", "range(whole - 1, -1, -1)", "range(whole - 1, 0, -1)", "roles_out_of_step deadlock wrong_result"),
    bug("the diagonal is one off", "columns <= tl.minimum(last", "columns < tl.minimum(last", "wrong_result"),
    bug("the diagonal starts at the top", "(row - column + kv_len - q_len)", "(row - column)", "wrong_result"),
    bug("the old output is not rescaled", "acc = acc * factor[:, None]", "acc = acc", "wrong_result"),
    bug("heads share the wrong keys", "kv_head = head // group", "kv_head = head % (heads // group)", "wrong_result out_of_bounds"),
    bug("too few bytes of V", "barrier_expect_bytes(v_full[stage], BLOCK_N * HEAD * 2)", "barrier_expect_bytes(v_full[stage], BLOCK_N * HEAD)", "wrong_byte_count"),
    bug("the turn is never handed over", "tlx.named_barrier_arrive(next_turn, 256)\n", "pass\n", "deadlock"),
    bug("the fence is missing", 'tlx.fence("async_shared")', "pass", "missing_fence"),
    bug("the staging tile is reused at once", "tlx.async_descriptor_store_wait(0)\n                staging = ", "staging = ", "early_release"),
    bug("stores are left behind", "            tlx.async_descriptor_store_wait(0)\n\n\n", "\n\n", "unfinished_at_exit"),
]  # fmt: skip

DYNAMIC_BUGS = [
    bug("tiles are worked on twice", "return drawn + tl.num_programs(0)", "return drawn", "data_race wrong_result"),
    bug("a tile is left out", "return drawn + tl.num_programs(0)", "return drawn + tl.num_programs(0) + 1", "wrong_result"),
    bug("the consumers take the tile of the other stage", "tl.max(tlx.local_load(next_tiles[q_stage]), 0)", "tl.max(tlx.local_load(next_tiles[q_stage ^ 1]), 0)", "unwritten_shared data_race deadlock roles_out_of_step wrong_result"),
    bug("the next tile is announced to the other stage", "tlx.barrier_arrive(next_known[q_stage])", "tlx.barrier_arrive(next_known[q_stage ^ 1])", "deadlock barrier_reuse"),
    bug("the next tile is not announced", "tlx.barrier_arrive(next_known[q_stage])", "pass", "deadlock"),
    bug("the count starts anew too early", "if drawn == tiles - 1:", "if drawn == tiles - 2:", "wrong_result data_race deadlock limit"),
    bug("Q is not waited for", "tlx.barrier_wait(q_full[slot], q_phase)", "pass", "data_race early_release unwritten_shared"),
    bug("Q is not released", "release(q_empty[slot])", "pass", "deadlock"),
    bug("heads of the last group overlap", "width = min(HEAD_GROUP, tiles // row_tiles - first)", "width = HEAD_GROUP", "wrong_result out_of_bounds deadlock roles_out_of_step"),
    bug("long rows come last", "row_tiles - 1 - index // width", "row_tiles - index // width", "wrong_result out_of_bounds deadlock roles_out_of_step"),
    bug("the old output is not rescaled", "acc = rescaled(acc, factor)", "acc = acc", "wrong_result"),
    bug("the old sums are not rescaled", "total * factor[:, None] + sums", "total + sums", "wrong_result"),
    bug("a block that is passed over is not waited for", "range(end, tile_end):\n                    tlx.barrier_wait(k_full[stage], phase)", "range(end, tile_end):", "barrier_reuse early_release deadlock"),
    bug("keys that are passed over are kept", "range(end, tile_end):\n                    tlx.barrier_wait(k_full[stage], phase)\n                    release(k_empty[stage])", "range(end, tile_end):\n                    tlx.barrier_wait(k_full[stage], phase)", "deadlock"),
    bug("a block too few is passed over", "range(end, tile_end)", "range(end + 1, tile_end)", "deadlock roles_out_of_step wrong_result"),
    bug("one consumer's rows see what the next one's do", "row += consumer * WG_M\n                _, _, whole, end", "row += consumer * WG_M + WG_M\n                _, _, whole, end", "wrong_result deadlock roles_out_of_step out_of_bounds data_race"),
    bug("neighbouring columns change places", "low, high = tl.split", "high, low = tl.split", "wrong_result"),
    bug("the upper half of a word is taken for the lower", "low = words.to(tl.int16)", "low = (words >> 16).to(tl.int16)", "wrong_result"),
    bug("probabilities may overflow", "slack = 8.0 / scale", "slack = 1000.0 / scale", "wrong_result"),
]  # fmt: skip

VARLEN_BUGS = [
    bug("values are released before they are read", "acc = tlx.async_dot_wait(0, acc)\n                    release(v_empty[v_stage])\n                    acc = acc *", "release(v_empty[v_stage])\n                    acc = tlx.async_dot_wait(0, acc)\n                    acc = acc *", "early_release"),
    bug("Q is released while the output leaves through it", "                tlx.async_descriptor_store_wait(0)\n", "", "early_release"),
    bug("the producer forgets short tiles", "before + heads * tl.cdiv(rows, BLOCK_M)", "before + heads * (rows // BLOCK_M)", "roles_out_of_step deadlock wrong_result unfinished_at_exit"),
    bug("a sequence begins one tile late", "searching = index >= end", "searching = index > end", "wrong_result data_race out_of_bounds roles_out_of_step deadlock"),
    bug("tiles of one head are counted", "before + heads * tl.cdiv(rows, BLOCK_M)", "before + tl.cdiv(rows, BLOCK_M)", "wrong_result data_race"),
    bug("the search starts anew, the count does not", "                sequence, before = find(index, sequence, before", "                sequence, before = find(index, 0, before", "wrong_result data_race deadlock limit"),
    bug("rows are taken for keys", "= spans(q_ends, kv_ends, sequence)", "= spans(kv_ends, q_ends, sequence)", "roles_out_of_step deadlock wrong_result", 1),
    bug("a tile is left out", "index = drawn + tl.num_programs(0)", "index = drawn + tl.num_programs(0) + 1", "wrong_result"),
    bug("tiles are worked on twice", "index = drawn + tl.num_programs(0)", "index = drawn", "data_race wrong_result"),
    bug("the next tile is not announced", "tlx.barrier_arrive(next_known[q_stage])", "pass", "deadlock"),
    bug("keys start where the rows do", "kv_start = tl.load(kv_ends + sequence)", "kv_start = tl.load(q_ends + sequence)", "wrong_result roles_out_of_step deadlock"),
    bug("the last sequence is looked for one further", "kv_len = tl.load(kv_ends + sequence + 1)", "kv_len = tl.load(kv_ends + sequence + 2)", "out_of_bounds wrong_result"),
    bug("keys count from the next sequence's end", "where = FAR - kv_len", "where = FAR - kv_len + 1", "wrong_result"),
    bug("the end of Q is one late", "[FAR, q_start + q_len, head, FAR - q_len + row + i", "[FAR, q_start + q_len + 1, head, FAR - q_len + row + i", "wrong_result"),
    bug("addresses wrap to elsewhere", "tlx.async_descriptor_load(v_desc, v_tiles[stage], [FAR,", "tlx.async_descriptor_load(v_desc, v_tiles[stage], [FAR - 1,", "out_of_bounds wrong_result error"),
    bug("the output runs into the next sequence", "staging, [FAR, q_start + q_len, head, FAR - q_len + row, 0]", "staging, [FAR, q_start + q_len + WG_M, head, FAR - WG_M - q_len + row, 0]", "data_race wrong_result out_of_bounds"),
    bug("the log-sum-exp runs into the next sequence", "mask=rows < q_len", "mask=rows < q_len + 1", "data_race wrong_result out_of_bounds"),
    bug("the log-sum-exp of every sequence lies at the start", "total_q + q_start + rows", "total_q + rows", "data_race wrong_result"),
]  # fmt: skip

#: What both kernels have in common whose last round is split.
LAST_ROUND_BUGS = [
    bug("a piece is counted before all threads have stored it", "tl.debug_barrier()\n", "pass\n", "data_race"),
    bug("the last but one puts pieces together", "== pieces - 1:", "== pieces - 2:", "data_race wrong_result"),
    bug("the first puts pieces together", "== pieces - 1:", "== 0:", "data_race"),
    bug("columns of a pair change places", "(3, 0, 2, 4, 1, 5)", "(3, 0, 2, 4, 5, 1)", "wrong_result"),
    bug("the count stays", "tl.store(arrived, 0)", "pass", "wrong_result"),
    bug("pieces begin at the first block", "tl.where(turn == 0, block, 0)", "block * 0", "wrong_result"),
    bug("pieces end at the last block", "next_block, blocks)", "blocks, blocks)", "wrong_result"),
]  # fmt: skip

SPLIT_BUGS = [
    bug("all tiles count in one place", "tile = index - whole_tiles\n", "tile = 0\n", "data_race wrong_result"),
    bug("sums of pieces are not rescaled", "total * factor + sums * weight", "total + sums", "wrong_result"),
]  # fmt: skip

COOPERATIVE_SPLIT_BUGS = [
    bug("all tiles count in one place", "arrived_ptr + tile", "arrived_ptr", "data_race wrong_result"),
    bug("one piece is left out", "tl.where(piece + i < pieces, rows, 0)", "tl.where(piece + i < pieces - 1, rows, 0)", "wrong_result"),
    bug("the next tile's pieces are added", "tl.where(piece + i < pieces, rows, 0)", "rows", "wrong_result data_race out_of_bounds"),
    bug("rows of the last warps are not left", "// 32 * 16 < rows)", "// 32 * 16 < rows - 16)", "wrong_result"),
    bug("the producer walks over whole tiles", "for k in range(first * BLOCK_K, end * BLOCK_K, BLOCK_K):", "for k in range(0, K, BLOCK_K):", "deadlock roles_out_of_step wrong_result"),
]  # fmt: skip

DECODE_BUGS = [
    bug("a split is counted before all threads have stored it", "tl.debug_barrier()\n            if ", "if ", "data_race"),
    bug("keys are not waited for", "tlx.barrier_wait(k_full[stage], phase)", "pass", "data_race early_release unwritten_shared"),
    bug("values are not waited for", "tlx.barrier_wait(v_full[v_stage], v_phase)", "pass", "data_race early_release unwritten_shared"),
    bug("keys are not released", "release(k_empty[stage])", "pass", "deadlock"),
    bug("values are not released", "release(v_empty[v_stage])", "pass", "deadlock"),
    bug("keys are released under way", "scores = tlx.async_dot_wait(1, scores)", "scores = tlx.async_dot_wait(2, scores)", "early_accumulator"),
    bug("values are released under way", "acc = tlx.async_dot_wait(0, acc)", "acc = tlx.async_dot_wait(1, acc)", "early_accumulator early_release"),
    bug("one warp does not arrive", "% 32 == 0", "% 64 == 0", "deadlock"),
    bug("the producer's phase is inverted", "phase = 1\n", "phase = 0\n", "deadlock"),
    bug("the producer skips the last block", "range(end - 1, first - 1, -1)", "range(end - 1, first, -1)", "deadlock roles_out_of_step"),
    bug("the consumer skips the last block", "range(end - 2, first - 1, -1)", "range(end - 2, first, -1)", "roles_out_of_step wrong_result"),
    bug("the walk begins at the wrong end", "masked(scores, last, (end - 1) * BLOCK_N)", "masked(scores, last, first * BLOCK_N)", "wrong_result"),
    bug("splits overlap", "end = (split + 1) * blocks // splits", "end = (split + 1) * blocks // splits + 1", "wrong_result"),
    bug("a block belongs to no split", "end = (split + 1) * blocks // splits", "end = first + blocks // splits", "wrong_result"),
    bug("rows and heads in each other's place", "(rows // q_len).to(tl.int64) * head_stride + (rows % q_len)", "(rows % q_len).to(tl.int64) * head_stride + (rows // q_len)", "wrong_result out_of_bounds"),
    bug("the mask counts rows of the tile", "last = rows % q_len", "last = rows", "wrong_result"),
    bug("the diagonal starts at the top", "rows % q_len + (kv_len - q_len)", "rows % q_len", "wrong_result"),
    bug("the old output is not rescaled", "acc = acc * factor[:, None]", "acc = acc", "wrong_result"),
    bug("heads share the wrong keys", "kv_head = pair % kv_heads", "kv_head = pair // kv_heads", "wrong_result out_of_bounds data_race"),
    bug("too few bytes of V", "barrier_expect_bytes(v_full[stage], BLOCK_N * HEAD * 2)", "barrier_expect_bytes(v_full[stage], BLOCK_N * HEAD)", "wrong_byte_count"),
    bug("rows of Q beyond the tile", "inside = rows[:, None] < tile_rows", "inside = rows[:, None] < BLOCK_M", "out_of_bounds"),
    bug("splits store to one place", "(pair.to(tl.int64) * splits + split) * tile_rows", "pair.to(tl.int64) * splits * tile_rows", "data_race"),
    bug("the last but one combines", "== splits - 1:", "== splits - 2:", "wrong_result data_race"),
    bug("everyone combines", "== splits - 1:", ">= 0:", "data_race"),
    bug("a split arrives before its result", "            place = ", "            came = tl.atomic_add(arrived_ptr + pair, 1)\n            place = ", "data_race", also=('tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel", scope="gpu")', "came")),
    bug("arrivals of all heads are counted together", "arrived_ptr + pair", "arrived_ptr", "wrong_result data_race"),
    bug("a split that is not there counts", 'mask=seen, other=float("-inf")', "mask=seen, other=0.0", "wrong_result"),
    bug("results are combined by other logarithms", "largest * scale + tl.math.log2(total))", "(largest * scale + tl.math.log2(total)) * 0.6931471805599453)", "wrong_result"),
    bug("the output of a wrong tile", "kv_head.to(tl.int64) * group * out_head_stride", "kv_head.to(tl.int64) * out_head_stride", "wrong_result data_race"),
]  # fmt: skip

GROUPED_BUGS = [
    bug("an expert's last tile is forgotten", "across * tl.cdiv(tokens, BLOCK)", "across * (tokens // BLOCK)", "wrong_result roles_out_of_step deadlock"),
    bug("the producer forgets an expert's last tile", "offs_ptr, experts, across, BLOCK_M)", "offs_ptr, experts, across, 2 * BLOCK_M)", "roles_out_of_step deadlock wrong_result data_race", 2),
    bug("an expert begins one tile late", "searching = index >= before + tiles", "searching = index > before + tiles", "wrong_result data_race roles_out_of_step deadlock"),
    bug("tokens are not passed over with their expert", "            start += tokens\n", "", "wrong_result data_race out_of_bounds"),
    bug("the first expert's weights serve all", "[expert, k, col]", "[0, k, col]", "wrong_result"),
    bug("the first expert's bias serves all", "bias_ptr + expert.to(tl.int64) * N", "bias_ptr", "wrong_result"),
    bug("the bias of the next expert", "bias_ptr + expert.to(tl.int64) * N", "bias_ptr + expert * N + N", "wrong_result out_of_bounds"),
    bug("all experts' tokens begin at the first row", "[start + row, k]", "[row, k]", "wrong_result"),
    bug("a tile runs into the next expert", "start + tokens,", "start + tokens + WG_M,", "data_race wrong_result out_of_bounds", also=("FAR - tokens + row", "FAR - WG_M - tokens + row")),
    bug("the end of the result is one late", "start + tokens,", "start + tokens + 1,", "wrong_result out_of_bounds data_race"),
    bug("addresses wrap to elsewhere", "[FAR, end, row, col]", "[FAR - 1, end, row, col]", "out_of_bounds wrong_result error"),
    bug("the last expert's end is not read", "while expert < experts:", "while expert < experts - 1:", "roles_out_of_step deadlock wrong_result unfinished_at_exit", 1),
    bug("both consumers read one half of A", "a_tiles[stage * 2 + consumer]", "a_tiles[stage * 2]", "wrong_result"),
    bug("both consumers share a staging tile", "c_tiles[consumer]", "c_tiles[0]", "data_race early_release"),
    bug("a tile is left out", "index += tl.num_programs(0)", "index += tl.num_programs(0) + 1", "wrong_result"),
    bug("a tile is left out by the producer", "index += tl.num_programs(0)", "index += tl.num_programs(0) + 1", "roles_out_of_step deadlock wrong_result", 1),
]  # fmt: skip

WEIGHT_GRADIENT_BUGS = [
    bug("an expert without tokens takes no step", "range(0, max(tokens, 1), BLOCK_K)", "range(0, tokens, BLOCK_K)", "deadlock roles_out_of_step unwritten_shared"),
    bug("the last step reads on in A", "a_tiles[stage], [FAR, end, FAR - tokens + k, row]", "a_tiles[stage], [FAR, end + BLOCK_K, FAR - BLOCK_K - tokens + k, row]", "wrong_result"),
    bug("the last step reads on in both", "[FAR, end, FAR - tokens + k, ", "[FAR, end + BLOCK_K, FAR - BLOCK_K - tokens + k, ", "wrong_result"),
    bug("steps begin with the first token of all", "FAR - tokens + k", "FAR - end + k", "wrong_result"),
    bug("experts overlap", "expert = index // tiles", "expert = index // (tiles + 1)", "wrong_result data_race roles_out_of_step deadlock"),
    bug("the first expert begins where it ends", "mask=expert > 0, other=0", "mask=expert > 1, other=0", "wrong_result"),
    bug("the consumer takes a step more", "range(BLOCK_K, max(tokens, 1), BLOCK_K)", "range(0, max(tokens, 1), BLOCK_K)", "deadlock roles_out_of_step"),
    bug("all gradients are the first expert's", "[expert, row, col]", "[0, row, col]", "data_race wrong_result"),
]  # fmt: skip

PLANTED: list[tuple[KernelSource, Bug]] = [
    *((PINGPONG, one) for one in (*RING_BUGS, *PINGPONG_BUGS)),
    *((COOPERATIVE, one) for one in (*RING_BUGS, *COOPERATIVE_BUGS)),
    *((COOPERATIVE_SPLIT, one) for one in (*LAST_ROUND_BUGS, *COOPERATIVE_SPLIT_BUGS)),
    *((CP_ASYNC, one) for one in CP_ASYNC_BUGS),
    *((RESIDUAL, one) for one in (*RING_BUGS, *COOPERATIVE_BUGS, *RESIDUAL_BUGS)),
    *((GROUPED, one) for one in GROUPED_BUGS),
    *((WEIGHT_GRADIENT, one) for one in WEIGHT_GRADIENT_BUGS),
    *((FLASH, one) for one in FLASH_BUGS),
    *((FLASH_DYNAMIC, one) for one in DYNAMIC_BUGS),
    *((FLASH_SPLIT, one) for one in (*LAST_ROUND_BUGS, *SPLIT_BUGS)),
    *((VARLEN, one) for one in VARLEN_BUGS),
    *((DECODE, one) for one in DECODE_BUGS),
    *((VECTOR, one) for one in VECTOR_BUGS),
]


def identify(value: KernelSource | Bug) -> str:
    return emitted.identify(value) if isinstance(value, KernelSource) else value.name


@pytest.mark.parametrize("source", emitted.SOURCES, ids=identify)
def test_the_kernels_as_emitted_are_clean(source: KernelSource) -> None:
    report = check(source, 6)
    assert report.clean, "\n".join(map(str, report.findings))


@pytest.mark.parametrize("seed", range(3))  # seed i takes policy i first
@pytest.mark.parametrize(("source", "planted"), PLANTED, ids=identify)
def test_planted_bug_is_found_in_every_schedule(source: KernelSource, planted: Bug, seed: int) -> None:
    wrong = planted.plant(source)
    # Most show in the first small problem; what is found there first may be another kind.
    for stop_early in (True, False):
        kinds = {finding.kind for finding in check(wrong, 1, seed, limits=LIMITS, stop_early=stop_early).findings}
        if kinds & planted.kinds:
            break
    assert kinds & planted.kinds, f"found {sorted(kinds)}, wanted one of {sorted(planted.kinds)}"
