"""A hand-written kernel with a ring of two stages, simulated without a GPU with and without the stage's release.

    python examples/05_check.py
    tlxgen check examples/05_check.py --entry simulate

The load role fills a stage once the scale role has released it. Without the release the third block deadlocks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK = 256
STAGES = 2


@triton.jit
def scale(x_desc, out_ptr, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr, RELEASE: tl.constexpr):
    """out = 2 * x, block by block: one role loads through TMA, the other scales and stores."""
    tiles = tlx.local_alloc((BLOCK,), tl.float32, STAGES)
    full = tlx.alloc_barriers(STAGES, arrive_count=1)
    empty = tlx.alloc_barriers(STAGES, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for block in range(blocks):
                stage = block % STAGES
                tlx.barrier_wait(full[stage], (block // STAGES) % 2)
                x = tlx.local_load(tiles[stage])
                if RELEASE:
                    tlx.barrier_arrive(empty[stage])
                tl.store(out_ptr + block * BLOCK + tl.arange(0, BLOCK), 2.0 * x)
        with tlx.async_task(num_warps=1):
            for block in range(blocks):
                stage = block % STAGES
                tlx.barrier_wait(empty[stage], (block // STAGES) % 2 ^ 1)
                tlx.barrier_expect_bytes(full[stage], 4 * BLOCK)
                tlx.async_descriptor_load(x_desc, tiles[stage], [block * BLOCK], full[stage])


def simulate(release: bool = True) -> None:
    """The entry for `tlxgen check --entry simulate`: an ordinary launch with CPU tensors."""
    blocks = 5
    x, out = torch.randn(blocks * BLOCK), torch.full((blocks * BLOCK,), float("nan"))
    scale[(1,)](TensorDescriptor(x, [x.numel()], [1], [BLOCK]), out, blocks, BLOCK, STAGES, release)
    assert not release or torch.equal(out, 2 * x)


def simulate_without_release() -> None:
    """The same without the release; deadlocks."""
    simulate(release=False)


def main() -> None:
    """Checks both entries."""
    from pathlib import Path

    from tlxgen.simulator.check import check_host, describe

    for entry in ("simulate", "simulate_without_release"):
        print(f"{entry}:")
        print("\n".join(describe(check_host(Path(__file__), entry))))


if __name__ == "__main__":
    main()
