"""`python -m canter.cli`: the command line without the installed script."""

from canter.cli import main

main()
