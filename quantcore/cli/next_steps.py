"""The commands that try what a verdict advises, to be copied. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from quantcore.report.quality import Step

_ONE_OF = ({"effort", "quant_algo", "imatrix"}, {"o", "output", "output_dir"})
"""Flags that exclude each other, or say the same."""


def command_for(step: Step, number: int, arguments: Sequence[str], *, model_dir: str, output_dir: str) -> str:
    """Return the command of a step: that of ``quantize`` with ``arguments`` changed, or ``auto`` for a goal.

    Its result lies beside the others: the ``number`` is at the end of its folder's name.
    """
    flags = [*step.flags.split(), "-o", f"{output_dir.rstrip('/')}-{number}"]
    if "goal" in step.changes:
        return shlex.join(["bitfoundry", "auto", model_dir, *flags])
    return shlex.join(["bitfoundry", "quantize", *without(_names_set(flags), arguments), *flags])


def _names_set(flags: Sequence[str]) -> set[str]:
    names = {word.lstrip("-") for word in flags if word.startswith("-")}
    return names.union(*(same for same in _ONE_OF if names & same))


def without(names: set[str], arguments: Sequence[str]) -> Iterator[str]:
    """Yield ``arguments`` without the flags of these names, each of which has one value."""
    words = iter(arguments)
    for word in words:
        name, has_value, _ = word.partition("=")
        if not name.startswith("-") or name.lstrip("-").replace("-", "_") not in names:
            yield word
        elif not has_value:
            next(words, None)
