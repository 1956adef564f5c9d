"""Explains errors on standard error: what is wrong, where, what to do, and the stable code."""

import json
import sys

from rich.text import Text

from bitfoundry.commands import terminal
from bitfoundry.errors import ApiError, BitfoundryError

MAX_ALLOWED = 20
"""Number of allowed values that an error lists."""


def explain(error: BitfoundryError, *, as_json: bool = False) -> None:
    """Print an error on stderr: what is wrong, where, what to do, and its code."""
    places = error.errors if isinstance(error, ApiError) else []
    if as_json:
        body = {"code": error.code, "message": error.message, "hint": error.hint, "errors": places}
        print(json.dumps({"error": body}), file=sys.stderr)
        return
    terminal.err.print(Text.assemble(("error ", "bold red"), error.message), soft_wrap=True)
    said = ""
    for place in places:
        detail, hint = str(place.get("detail", "")), str(place.get("hint", ""))
        given = error.given_at(place) if isinstance(error, ApiError) else ""
        if detail and detail not in error.message:
            terminal.err.print(Text(f"      {place.get('pointer', '')} {detail}"), soft_wrap=True)
        allowed = place.get("allowed") or []
        is_told = all(str(value) in error.message for value in allowed)
        if len(allowed) <= MAX_ALLOWED and not is_told:  # of more than that the hint has the nearest ones
            terminal.err.print(Text(f"      allowed: {', '.join(map(str, allowed))}"), soft_wrap=True)
        told = detail if "values" in place else error.message + detail
        if given and given not in told:
            terminal.err.print(Text(f"      given: {given}"), soft_wrap=True)
        if hint:
            terminal.err.print(Text(f"      {hint}"), soft_wrap=True)
            said += f"{hint}\n"
    if error.hint and error.hint not in said:
        terminal.err.print(Text(f"      {error.hint}"), soft_wrap=True)
    terminal.err.print(Text(f"      {error.code}", "dim"))
