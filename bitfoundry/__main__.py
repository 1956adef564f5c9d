"""`python -m bitfoundry` is the command `bitfoundry`."""

from bitfoundry.cli import main

main()
