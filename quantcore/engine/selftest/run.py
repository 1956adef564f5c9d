"""Runs every part on a device and on the CPU, and compares and times them."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Generic, NamedTuple, TypeVar

import torch

from quantcore.engine.evaluation.provenance import environment
from quantcore.engine.runtime.devices import about, limit_threads, named_device, wait_for
from quantcore.engine.selftest import trial_job
from quantcore.engine.selftest.parts import CPU, SOLVED, Computed, Part, parts
from quantcore.engine.selftest.speeds import work_on
from quantcore.engine.selftest.values import SCHEMA_VERSION, Check, Difference, Selftest, Speed
from quantcore.errors import NumericsError, is_failure, reason_of
from quantcore.events import Emit, PhaseStarted, Progress

T = TypeVar("T")

PATHS = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][^\s/\\:'\"]+)+[/\\](?=[^\s/\\])")
"""The folders of a path, on any system."""
JOB = Part("job", f"{SOLVED} with GPTQ", trial_job.ALLOWED, trial_job.quantized, is_long=True)


def todo() -> list[Part]:
    return [*parts(), JOB]


def selftest(device_name: str | None, emit: Emit) -> Selftest:
    """Compute all parts and a small job on a device, by default the one that jobs use, and on the CPU.

    On the CPU alone one thread is compared with a reference, or with all threads. A part that fails is in the report.
    Raises ConfigError ``unknown_device``.
    """
    started = time.monotonic()
    num_threads, device = limit_threads(), named_device(device_name)
    emit(PhaseStarted("selftest"))
    checks: list[Check] = []
    all_parts = todo()
    for part in all_parts:
        checks.append(check(part, device, num_threads))
        emit(Progress("selftest", len(checks), len(all_parts), "part"))
    agreed = all(one.verdict == "agreed" for one in checks)
    return Selftest(
        schema_version=SCHEMA_VERSION,
        agreed=agreed,
        device=about(device),
        num_threads=num_threads,
        environment=_environment(),
        seconds=time.monotonic() - started,
        checks=tuple(checks),
        speeds=measured_speeds(device, num_threads) if agreed else (),  # what errs may be fast
    )


def check(part: Part, device: torch.device, num_threads: int) -> Check:
    """Compute one part on ``device`` and its reference."""
    beside, compute_beside = _beside(part, device, num_threads)
    known = Check(group=part.group, name=part.name, verdict="failed", allowed=part.allowed, beside=beside)
    try:
        with _threads(1 if device == CPU and not part.is_long else num_threads):
            found = _timed(lambda: part.compute(device), device, once=part.is_long)
        known = known.replace(first_s=found.first_s, device_s=found.again_s)
        if compute_beside is None:
            return known.replace(verdict="agreed")
        other = _timed(compute_beside, CPU, once=part.is_long)
        difference = compare(found.computed, other.computed)
    except BaseException as error:
        if not is_failure(error):
            raise
        kind, reason = type(error).__name__, reason_of(error)
        return known.replace(error=without_folders(reason if reason.startswith(kind) else f"{kind}: {reason}"))
    verdict = "agreed" if part.allowed.covers(difference) else "differs"
    return known.replace(verdict=verdict, difference=difference, beside_s=other.again_s)


def compare(found: Computed, other: Computed) -> Difference:
    """Compare codes with codes and numbers with numbers, as far as both have them.

    Raises NumericsError for numbers that are not finite, ValueError for results of other shapes.
    """
    share = largest = None
    for one, beside in ((found.codes, other.codes), (found.numbers, other.numbers)):
        if beside.numel() and one.shape != beside.shape:
            raise ValueError(f"the result has the shape {list(one.shape)}, instead of {list(beside.shape)}")
    if other.codes.numel():
        share = (found.codes.cpu() != other.codes.cpu()).double().mean().item()
    if other.numbers.numel():
        one, beside = found.numbers.cpu().double(), other.numbers.cpu().double()
        if not (one.isfinite().all() and beside.isfinite().all()):
            raise NumericsError("The result contains NaN or infinite values.", code="nonfinite_result")
        unit = beside.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        largest = ((one - beside).abs().max() / unit).item()
    return Difference(num_codes=other.codes.numel(), share=share, largest=largest)


def without_folders(text: str) -> str:
    """Return ``text`` with every path reduced to its last name, for a report that others read."""
    return PATHS.sub("", text)


def _beside(part: Part, device: torch.device, num_threads: int) -> tuple[str, Callable[[], Computed] | None]:
    """Return what is computed beside a part, and its name. None: the part proves itself."""
    if device != CPU:
        return "the CPU", lambda: part.compute(CPU)
    if part.is_long:
        return "its own proof", None
    if part.reference is not None:
        return "a reference", part.reference
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}", lambda: part.compute(CPU)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Compute in this ``number`` of threads on the CPU while this lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Timed(NamedTuple, Generic[T]):
    computed: T
    first_s: float
    again_s: float


def measured_speeds(device: torch.device, num_threads: int) -> tuple[Speed, ...]:
    """Time each kind of work on ``device``, the second time that it runs."""
    return tuple(
        Speed(
            name=work.name,
            amount=work.amount,
            unit=work.unit,
            seconds=_timed(work.run, device, once=False).again_s,
            planned_s=work.planned_s,
        )
        for work in work_on(device, num_threads)
    )


def _timed(compute: Callable[[], T], device: torch.device, *, once: bool) -> _Timed[T]:
    """Run ``compute``, and if not ``once`` a second time, when all kernels are compiled and all tables made."""
    seconds = []
    for _ in range(1 if once else 2):
        wait_for(device)
        started = time.perf_counter()
        computed = compute()
        wait_for(device)
        seconds.append(time.perf_counter() - started)
    return _Timed(computed, seconds[0], seconds[-1])


def _environment() -> dict[str, str]:
    found = {name: text for name, text in environment().items() if name != "device"}
    found |= {"system": platform.system(), "machine": platform.machine()}
    for name, number in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
        if number is not None:
            found[name] = number
    with suppress(PackageNotFoundError):  # not every build of torch needs it
        found["triton"] = version("triton")
    return found
