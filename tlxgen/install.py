"""`python -m tlxgen.install`: makes fbtriton the only `triton` of this environment.

Run it after installing or upgrading torch, whose CUDA build installs upstream's `triton`. Uninstalling that removes
files of fbtriton with the same names, so fbtriton is reinstalled afterwards.
"""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys

from tlxgen.toolchain import Triton, explain, fbtriton_requirement, import_error, inspect


def steps(state: Triton) -> list[list[str]]:
    """The pip commands that lead from `state` to one working `triton`; none if there is one already.

    >>> broken = Triton(None, "", None, {"fbtriton": "3.7.4"}, damaged=True, has_tlx_files=False)
    >>> [command[0] for command in steps(broken)]
    ['install']
    """
    if state.has_tlx and not state.upstream:
        return []
    remove = [["uninstall", "--yes", *state.upstream]] if state.upstream else []
    return [*remove, ["install", "--force-reinstall", "--no-deps", fbtriton_requirement()]]


def main() -> int:
    """Runs the steps, checks the result and returns the exit status."""
    for command in steps(inspect()):
        print("+ pip", shlex.join(command), flush=True)  # noqa: T201
        status = subprocess.run([sys.executable, "-m", "pip", *command], check=False).returncode
        if status:
            print(f"tlxgen: `pip {shlex.join(command)}` failed", file=sys.stderr)  # noqa: T201
            return status
    importlib.invalidate_caches()
    state = inspect()
    if problem := explain(state) or import_error():
        print(f"tlxgen: TLX cannot be used: {problem}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"tlxgen: triton {state.version} with TLX, from {state.owner or state.folder}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
