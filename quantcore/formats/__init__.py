"""Number formats as data. What a format *is* needs no torch; what computes with it imports torch when called.

Every format: ``encode(x) -> codes``, ``decode(codes) -> float32``, and ``round`` / ``round_`` for what the two give one
after the other. x holds scaled values in float32, any shape. On the CPU all are fastest on pieces that fit the cache.
An installed package adds formats by the entry points ``bitfoundry.formats`` (docs/extending/dtype.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quantcore.formats.codebooks import CODEBOOKS, CodebookFormat
from quantcore.formats.floats import FLOATS, FloatFormat
from quantcore.formats.ints import INTS, IntFormat
from quantcore.registry import Registry

Format = IntFormat | FloatFormat | CodebookFormat
BUILT_IN: Mapping[str, Format] = {fmt.name: fmt for fmt in (*INTS, *FLOATS, *CODEBOOKS)}


def _check(name: str, entry: object) -> None:
    """Raises ValueError unless ``entry`` is a format of that name."""
    if not isinstance(entry, Format):
        raise ValueError(f"it is a {type(entry).__name__}, not an IntFormat, FloatFormat or CodebookFormat")
    if entry.name != name:
        raise ValueError(f"the name of the format is '{entry.name}'")


class _Formats(Mapping[str, Format]):
    """The built-in formats in their order, then those of installed packages, which are loaded when one is needed."""

    def __init__(self) -> None:
        self._registry: Registry[Format] = Registry("dtype", None, "bitfoundry.formats", check=_check)
        for name, fmt in BUILT_IN.items():
            self._registry.add(name)(fmt)

    def __getitem__(self, name: str) -> Format:
        fmt = BUILT_IN[name] if name in BUILT_IN else self._registry.find(name)
        if fmt is None:
            raise KeyError(name)
        return fmt

    def __iter__(self) -> Iterator[str]:
        return iter([*BUILT_IN, *(name for name in self._registry if name not in BUILT_IN)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


FORMATS: Mapping[str, Format] = _Formats()

__all__ = ["FORMATS", "CodebookFormat", "FloatFormat", "Format", "IntFormat"]
