"""One small registry for everything that is chosen by name: solvers, observers, exporters."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from quantcore.errors import unknown_value

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to plug-ins. Every module of ``package`` is imported at the first look-up; a name is given only once."""

    def __init__(self, what: str, package: str) -> None:
        self.what = what
        self._package = package
        self._entries: dict[str, T] = {}
        self._lock = threading.RLock()  # the one that loads may look up meanwhile, others wait: half is not all
        self._is_loading = self._is_loaded = False

    def add(self, name: str) -> Callable[[T], T]:
        """Decorator: register the thing below under ``name``."""

        def register(entry: T) -> T:
            if name in self._entries:
                raise RuntimeError(f"{self.what} '{name}' is registered twice")
            self._entries[name] = entry
            return entry

        return register

    def get(self, name: str) -> T:
        """The entry called ``name``; a ConfigError that lists the names if there is none."""
        self._load()
        if name not in self._entries:
            raise unknown_value(self.what, name, sorted(self._entries), code=f"unknown_{self.what}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))

    def _load(self) -> None:
        if self._is_loaded:
            return
        with self._lock:
            if self._is_loading or self._is_loaded:
                return
            self._is_loading = True
            try:
                package = importlib.import_module(self._package)
                for module in pkgutil.iter_modules(package.__path__):
                    importlib.import_module(f"{self._package}.{module.name}")
                self._is_loaded = True
            finally:
                self._is_loading = False
