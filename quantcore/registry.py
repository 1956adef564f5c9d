"""Registries of things that are chosen by name: formats, observers, algorithms, exporters.

Entries come from three places: the modules of a package of the engine, the entry points of installed packages (see
docs/extending), and ``add`` or ``put`` in a running process. Names in installed packages are read without importing
them.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from quantcore.errors import ConfigError, is_failure, reason_of, unknown_value

T = TypeVar("T")
logger = logging.getLogger(__name__)


@cache
def plug_ins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points that installed packages declare in ``group``, by name, without importing them.

    If two packages declare the same name, the first package in alphabetical order keeps it.
    """
    chosen: dict[str, EntryPoint] = {}
    for entry_point in sorted(entry_points(group=group), key=package_of):
        if chosen.setdefault(entry_point.name, entry_point) is not entry_point:
            owner = package_of(chosen[entry_point.name])
            logger.warning("%s", _refusal(entry_point, f"the package {owner} already uses that name"))
    return chosen


def package_of(entry_point: EntryPoint) -> str:
    """Return the name and version of the package that declares ``entry_point``."""
    return "unknown" if entry_point.dist is None else f"{entry_point.dist.name} {entry_point.dist.version}"


class Registry(Generic[T]):
    """Mapping from names to the things of one kind.

    ``what`` is the kind, as errors call it. Every module of ``package`` is imported at the first look-up.
    ``groups`` are the groups of entry points that installed packages may use. ``check`` raises ValueError for an entry
    of an installed package that cannot be used. ``others`` gives entries that another registry holds.
    """

    def __init__(
        self,
        what: str,
        package: str | None = None,
        *groups: str,
        check: Callable[[str, Any], None] | None = None,
        others: Callable[[], Mapping[str, T]] | None = None,
    ) -> None:
        self.what = what
        self._package = package
        self._groups = groups
        self._check = check
        self._others = others
        self._entries: dict[str, T] = {}
        self._put: set[str] = set()
        self._broken: dict[str, ConfigError] = {}
        self._lock = threading.RLock()  # the loading thread may look up, others wait until all is loaded
        self._is_loading = self._is_loaded = False

    def add(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its object as ``name``. It raises RuntimeError for a name in use."""

        def register(entry: T) -> T:
            if name in self._entries:
                raise RuntimeError(f"{self.what} '{name}' is registered twice")
            self._entries[name] = entry
            return entry

        return register

    def put(self, name: str, entry: T) -> None:
        """Register ``entry`` in this process; it replaces an entry that was put under the same name before.

        Raises ConfigError for a name that is built in or an installed package's, and for an entry that cannot be used.
        """
        self._load()
        if name in self._entries.keys() - self._put:
            raise ConfigError(
                f"The {self.what} '{name}' exists already.", code="name_taken", hint="Choose another name."
            )
        try:
            if self._check is not None:
                self._check(name, entry)
        except ValueError as error:
            raise ConfigError(
                f"The {self.what} '{name}' cannot be used: {reason_of(error)}.", code="broken_plug_in"
            ) from error
        self._put.add(name)
        self._entries[name] = entry

    def get(self, name: str) -> T:
        """Return the entry called ``name``.

        Raises ConfigError that lists the names if there is none, or that names the package whose entry cannot be
        loaded.
        """
        entry = self.find(name)
        if entry is None:
            raise unknown_value(self.what, name, sorted(self._all()), code=f"unknown_{self.what}")
        return entry

    def find(self, name: str) -> T | None:
        """Return the entry called ``name``, or None. Raises ConfigError if its package cannot be used."""
        entry = self._all().get(name)
        if entry is None and name in self._broken:
            raise self._broken[name]
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    @property
    def broken(self) -> Mapping[str, ConfigError]:
        """The errors of the entries of installed packages that cannot be used, by name."""
        self._all()
        return self._broken

    def _all(self) -> Mapping[str, T]:
        self._load()
        return self._entries if self._others is None else {**self._entries, **self._others()}

    def _load(self) -> None:
        if self._is_loaded:
            return
        with self._lock:
            if self._is_loading or self._is_loaded:
                return
            self._is_loading = True
            try:
                if self._package is not None:
                    package = importlib.import_module(self._package)
                    for module in pkgutil.iter_modules(package.__path__):
                        importlib.import_module(f"{self._package}.{module.name}")
                for group in self._groups:
                    for name, entry_point in plug_ins(group).items():
                        self._load_plug_in(name, entry_point)
                self._is_loaded = True
            finally:
                self._is_loading = False

    def _load_plug_in(self, name: str, entry_point: EntryPoint) -> None:
        """Add the entry of an installed package; a package that fails is noted and does not affect others."""
        try:
            if name in self._entries:
                raise ValueError(f"the {self.what} '{name}' exists already")
            entry = entry_point.load()
            if self._check is not None:
                self._check(name, entry)
        except BaseException as error:
            if not is_failure(error):
                raise
            refusal = _refusal(entry_point, reason_of(error))
            logger.warning("%s", refusal)
            if name not in self._entries:
                self._broken[name] = refusal
        else:
            self._entries[name] = entry


def _refusal(entry_point: EntryPoint, reason: str) -> ConfigError:
    name = "" if entry_point.dist is None else entry_point.dist.name
    return ConfigError(
        f"'{entry_point.name}' of the installed package {package_of(entry_point)} cannot be used: {reason}.",
        code="broken_plug_in",
        hint=f"Fix the entry point {entry_point.group} {entry_point.name} = {entry_point.value}, or remove the "
        f"package: pip uninstall {name}.",
    )
