"""`python -m kdn`: the command line, where no `kdn` command is installed."""

from kdn.cli.main import main

main()
