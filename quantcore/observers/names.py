"""The observers under the names that configs write: ``PerTensorMinMaxObserver``, ``PerChannelMSEObserver`` ...

Real classes, made from ``OBSERVER_NAMES`` when they are asked for: ``PerTensorMSEObserver(spec)`` observes as
``observer_for(spec)`` would, and is an instance of ``MSEObserver`` too.
"""

from __future__ import annotations

import re
from functools import cache

from quantcore.observers.observer import OBSERVERS, Observer
from quantcore.spec import OBSERVER_METHODS, OBSERVER_NAMES, QSchemeType

__all__ = list(OBSERVER_NAMES)  # made below, on demand


def __getattr__(name: str) -> type[Observer]:
    if name not in OBSERVER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _named(name)


def __dir__() -> list[str]:
    return sorted(OBSERVER_NAMES)


@cache
def _named(name: str) -> type[Observer]:
    if name == "PlaceholderObserver":
        return OBSERVERS.get("placeholder")
    found = re.fullmatch(r"Per(Tensor|Channel|Group|Block)(.*)Observer", name)
    assert found is not None
    size, method = found.groups()
    if method == "MX":  # OCP MX: the exact range of groups of 32, whatever the scheme calls them
        return type(name, (OBSERVERS.get("min_max"),), {"__module__": __name__})
    members = {"__module__": __name__, "qscheme": QSchemeType(f"per_{size.lower()}")}
    return type(name, (OBSERVERS.get(OBSERVER_METHODS[method]),), members)
