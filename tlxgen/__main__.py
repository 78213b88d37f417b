"""`python -m tlxgen`: the command line."""

from tlxgen.cli.app import main

main()
