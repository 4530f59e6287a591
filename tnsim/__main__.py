"""`python -m tnsim` is the command line."""

from tnsim.cli.app import main

main()
