"""What the steps of a job have in common, and what is noted while they run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantcore.config.task import Task
from quantcore.engine.blockwise.savepoint import SavePoint
from quantcore.engine.calibration.imatrix import GivenInputs
from quantcore.engine.runtime.devices import peak_memory_bytes
from quantcore.engine.runtime.ranks import Ranks
from quantcore.events import Emit, Event, PhaseClock, Warned
from quantcore.importing.model import Model
from quantcore.plan.planner import Plan


@dataclass(frozen=True)
class RunContext:
    """A planned job.

    ``task`` has the defaults that depend on the model. ``model`` is the original as it lies on the disk. The result is
    written to ``folder``. ``emit`` is silent on all ranks but the first. ``saved`` is the state in ``savepoint`` behind
    the last block of an earlier run; None for a job that begins. ``given``: what is known of the layers' inputs without
    calibration.
    """

    task: Task
    model: Model
    plan: Plan
    folder: Path
    emit: Emit
    savepoint: SavePoint
    saved: dict[str, Any] | None = None
    given: GivenInputs | None = None

    @property
    def ranks(self) -> Ranks:
        """The processes that share the job."""
        return self.savepoint.ranks


class RunLog:
    """What is noted while a job runs, for its report. ``emit`` passes events on, and notes warnings and phases."""

    def __init__(self, emit: Emit) -> None:
        self.warnings: list[Warned] = []
        self.mixed: dict[str, Any] | None = None
        """The result of ``engine.mixed_precision.command.choose`` if the config was chosen by it."""
        self.quantize_s = 0.0
        self.peaks_bytes: Sequence[int] = ()
        """The peak memory of each rank's process while it quantized."""
        self._started = time.monotonic()
        self._pass_on = emit
        self.emit = PhaseClock(self._note)

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._started

    def end_of_quantizing(self, ranks: Ranks) -> None:
        """Note time and memory. All ranks call it."""
        self.peaks_bytes = ranks.gather(peak_memory_bytes())
        self.quantize_s = self.total_s

    def _note(self, event: Event) -> None:
        if isinstance(event, Warned):
            self.warnings.append(event)
        self._pass_on(event)
