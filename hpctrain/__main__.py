"""`python -m hpctrain` is the command `hpctrain`."""

from hpctrain.cli import main

main()
