"""Entry point: `python -m bitfoundry` is the command `bitfoundry`."""

from bitfoundry.commands.main import main

main()
