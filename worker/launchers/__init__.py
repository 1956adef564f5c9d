"""Launchers: what gives an engine its nodes. Without one, a worker starts its engines on its own machine.

A launcher asks the scheduler of a cluster (Slurm, or another that a package adds as an entry point of the group
``bitfoundry.launchers``). It places a job, says what became of it and cancels it. What an engine reports comes through
files on the disk that the worker and the nodes share (``worker.allocation``, ``worker.on_node``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from api.settings import Settings
from quantcore.registry import Registry

LOCAL = "local"
GROUP = "bitfoundry.launchers"
"""The group of entry points by which installed packages add launchers: classes that are made with the settings."""


class LauncherAway(Exception):
    """The scheduler does not answer, or cannot now: ask again later. Its text is what the scheduler said."""


class End(Enum):
    """The reasons why an allocation has ended, as far as the scheduler knows them."""

    EXITED = "exited"
    CANCELLED = "cancelled"
    OUT_OF_TIME = "out_of_time"
    OUT_OF_MEMORY = "out_of_memory"
    INTERRUPTED = "interrupted"  # preempted, or a node was lost; it does not start again by itself
    FORGOTTEN = "forgotten"  # the scheduler does not know it any more


@dataclass(frozen=True)
class Request:
    """What an attempt needs: the program ``argv`` once on each of ``nodes`` nodes.

    ``name`` is that of the job: the scheduler never runs two allocations of one name at once. The scheduler's files go
    into ``folder``. ``memory_bytes`` and ``cpus`` are those of each node. ``environment`` is all that the program gets
    of the worker's environment.
    """

    name: str
    folder: Path
    argv: tuple[str, ...]
    nodes: int
    memory_bytes: int
    cpus: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Status:
    """The state of an allocation: the scheduler's ``word`` for it, its ``reason`` and the names of its ``nodes``."""

    word: str
    is_running: bool = False
    end: End | None = None
    reason: str = ""
    nodes: str = ""


class Launcher(Protocol):
    """A scheduler. Its methods raise LauncherAway when it does not answer."""

    name: str

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError ``invalid_settings`` for what can be seen at once."""

    @staticmethod
    def preview(settings: Settings, request: Request) -> str:
        """Return what ``submit`` would ask for, as text. Raises ConfigError ``invalid_settings``."""

    def submit(self, request: Request) -> str:
        """Ask for an allocation and return its id. Raises ConfigError ``launcher_refused`` if it can never be given."""

    def find(self, name: str) -> dict[str, Path]:
        """Return the ids of the allocations of this name that have not ended, each with its folder."""

    def status(self, allocation: str) -> Status:
        """Return the state of an allocation."""

    def cancel(self, allocation: str) -> None:
        """Ask for its end: SIGTERM, and SIGKILL after the scheduler's grace time. One that has ended stays as it is."""


LAUNCHERS: Registry[type[Launcher]] = Registry("launcher", "worker.launchers", GROUP)


def find_launcher(settings: Settings) -> Launcher | None:
    """Return the launcher that the settings name; None if engines run on this machine.

    Raises ConfigError ``unknown_launcher``, and what the launcher finds wrong with its settings.
    """
    return None if settings.launcher == LOCAL else LAUNCHERS.get(settings.launcher)(settings)
