"""The command line. `main` is the entry point of `tlxgen`; commands are declared in `app`, one module does each."""

from __future__ import annotations


def main() -> None:
    """Runs the command line of this process; see `tlxgen.cli.app.main`."""
    from tlxgen.cli.app import main as run

    run()
