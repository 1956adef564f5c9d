"""What can go wrong on the person's side of the service: each error says what to do next."""


class BitfoundryError(Exception):
    """A failure with a message for a person, a hint for the way out and a stable code for a program."""

    code = "bitfoundry_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class StackError(BitfoundryError):
    """A part of the local stack cannot start or stop."""

    code = "local_stack_failed"
