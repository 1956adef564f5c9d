"""What a person installs and types: the client, the commands and the stack on this machine."""

__version__ = "0.1.0"
