"""A kernel written to a stand-alone file, as `tlxgen emit` does.

    python examples/03_emit.py [file]

The file needs torch and fbtriton but not tlxgen; run on a Hopper GPU, it checks itself against torch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tlxgen import devices, ops
from tlxgen.codegen.emit import emit
from tlxgen.space.candidates import default_config


def main() -> None:
    gemm = ops.get("gemm")
    problem = gemm.problem((4096, 4096, 4096), layout="nt", epilogue="bias+gelu")
    config = default_config(problem, devices.target("h200"))  # the time model's first choice
    assert config is not None
    source = emit(gemm, problem, config)

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / source.file_name
    path.write_text(source.text, encoding="utf-8")
    print(f"{problem.label}: {config.short}")
    print(f"  {len(source.text.splitlines())} lines written to {path}")
    print(f"  on a Hopper GPU: python {path}")


if __name__ == "__main__":
    main()
