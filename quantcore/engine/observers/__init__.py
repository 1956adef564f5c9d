"""Observers learn the range of a tensor that comes in many pieces. One file for each; see ``observer``."""

from __future__ import annotations

from quantcore.engine.observers.observer import OBSERVERS, Observer, observer_for

__all__ = ["OBSERVERS", "Observer", "observer_for"]
