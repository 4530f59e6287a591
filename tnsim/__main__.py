"""`python -m tnsim` is the command line."""

from tnsim.cli import main

main()
