"""``bitfoundry auto``: quantizes candidates until one is measured to meet the goal, and keeps that one.

One pass over the float model estimates what the rounding of every layer costs in each scheme that the runtime computes
on the device (``engine.mixed_precision.sensitivity``). The best mix of every size is a candidate. ``find_smallest``
chooses the few that are quantized as whole jobs, with their algorithms, proof and measurement. Only the best result so
far is kept on disk. What was measured before is read, not repeated: by this search if it was stopped, and by searches
for other goals (``BaselineCache``).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import building, seal
from quantcore.config.quantization import Config
from quantcore.config.recipes import DEFAULT_EFFORT, Effort, algorithms_text, recipe
from quantcore.config.task import Task, read_task
from quantcore.config.verdict_levels import POOR
from quantcore.engine.blockwise.savepoint import SavePoint, fingerprint
from quantcore.engine.evaluation.baseline_cache import BaselineCache
from quantcore.engine.evaluation.model import open_model
from quantcore.engine.evaluation.provenance import model_identity
from quantcore.engine.mixed_precision.command import bytes_outside_of, config_of, read_texts, units_of
from quantcore.engine.mixed_precision.sensitivity import Sensitivity, in_pieces
from quantcore.engine.model.kinds import Kind
from quantcore.engine.model.skeleton import kind_of
from quantcore.engine.pipeline import job
from quantcore.engine.pipeline.build_report import write_report
from quantcore.engine.pipeline.context import RunContext
from quantcore.engine.pipeline.writer import other_bytes
from quantcore.engine.runtime.ranks import ALONE, Ranks
from quantcore.engine.verification.gate_inputs import tell_gates
from quantcore.errors import ConfigError
from quantcore.events import CandidateMeasured, Completed, Emit, PhaseClock, PhaseStarted, Progress, silence
from quantcore.hub.download import fetch
from quantcore.importing.model import Model, read_model
from quantcore.plan.fitting import fit, megabytes, within_files
from quantcore.plan.job import with_model_defaults
from quantcore.plan.mix_choice import Mix, Option, Unit, mixes
from quantcore.plan.mix_search import Point, find_smallest, predict
from quantcore.report.compare import read_report
from quantcore.report.gate_result import GateResult
from quantcore.report.values import GoalPoint, GoalResult, GoalSummary, GoalTrial, Report
from quantcore.report.verdict import with_failed_gates

MAX_TRIALS = 5
LEFT_BY_GPTQ = 0.35
"""Divergence that remains of the estimate of plain rounding, once GPTQ has run: see docs/benchmarks.md."""
LEFT_BY_IMATRIX = 0.6
"""Divergence that remains with an importance matrix instead, by which rtn rounds: see docs/how-to/gguf.md."""
LEFT_AT_WORST = 1.5
"""A cautious value for the same, above the 0.9 to 1.2 that SmolLM2 had with little text at the end of its interval.

A search with a time limit begins with it, since there may be no time for a second trial.
"""
SHOWN_POINTS = 24
"""Number of sizes that the report's frontier shows."""
ADVICE_STEPS = (1.1, 1.25, 0.9, 0.75)
"""Sizes, relative to the chosen one, for which the report says what to expect."""


def run_goal(task: Task, emit: Emit, ranks: Ranks = ALONE) -> Report | None:
    """Run the search for ``task.goal``, and move the chosen result to ``output_dir``; else as
    ``engine.pipeline.job.run``.

    Raises ConfigError ``goal_too_small`` if nothing fits, and the errors of a job.
    """
    assert task.goal is not None
    emit = PhaseClock(emit if ranks.is_first else silence)
    emit(PhaseStarted("resolve"))
    task = ranks.share(fetch(task, emit) if ranks.is_first else task)
    model = read_model(task.model_folder)
    task = with_model_defaults(task, model.headers.config).model_copy(update={"token_on_stdin": False})
    work_dir = task.resume_dir or task.output_dir.with_name(f".{task.output_dir.name}.auto")
    emit(PhaseStarted("plan"))
    search = _Search(task, model, work_dir, emit, ranks)
    with ExitStack() as stack:
        folder = stack.enter_context(building(task.output_dir, work_dir)) if ranks.is_first else work_dir
        ranks.wait()
        search.run()
        if not ranks.is_first:
            return None
        report = search.finish(folder, emit.seconds)
        tell_gates(task, report, emit)
    emit(Completed(report.summary.to_dict()))
    return report


@dataclass(frozen=True)
class _Tried:
    """A trial as it is remembered: its row of the report, whose ``is_chosen`` is not decided yet, and its folder.

    ``run`` makes the folder, which is missing if only the row was remembered.
    """

    row: GoalTrial
    folder: Path
    run: Callable[[], dict[str, Any]]

    @property
    def loss(self) -> float:
        """The KL divergence at the unfavourable end of its interval."""
        return -math.log(self.row.recovery)


@dataclass
class _Search:
    """The search of one task: its candidates and what was measured so far."""

    task: Task
    model: Model
    work_dir: Path
    emit: Emit
    ranks: Ranks
    started: float = field(default_factory=time.monotonic)
    tried: list[_Tried] = field(default_factory=list)
    is_out_of_time: bool = False

    def __post_init__(self) -> None:
        assert self.task.goal is not None
        self.goal = self.task.goal
        _check_kind(self.model.headers.config)
        self.fit = fit(self.goal, self.model.headers, self.task.calibration, self.task.export)
        if self.goal.max_bytes is not None:
            self.fit = within_files(self.goal, self.fit, self.ranks.share(self._other_bytes()))

    def run(self) -> None:
        """Measure candidates until the search ends; then make the files of the best one, if they are not there."""
        self._search()
        best = self._best()
        if not self.ranks.share(best.folder.is_dir()):
            row = GoalTrial.model_validate(self.ranks.share(best.run()))
            self.tried[self.tried.index(best)] = replace(best, row=row)

    def _search(self) -> None:
        units, outside = self._units()
        configs = {name: config for name, (config, _) in self.fit.plans.items()}
        frontier = [
            mix for mix in mixes(units) if self.fit.max_bytes is None or mix.num_bytes + outside <= self.fit.max_bytes
        ]
        self.frontier = frontier or [mixes(units)[0]]
        self.points = [Point(mix.num_bytes + outside, mix.loss) for mix in self.frontier]
        most = self.goal.max_divergence
        measure = partial(self._measure, units, configs)
        last = len(self.points) - 1
        if most is None:
            self.measured = {last: measure("best", last)}
            return
        has_imatrix = self.task.config.imatrix is not None
        left = LEFT_BY_IMATRIX if has_imatrix else LEFT_BY_GPTQ
        first_guess = left if self.goal.max_time_s is None else LEFT_AT_WORST
        found = find_smallest(
            self.points,
            most,
            partial(measure, DEFAULT_EFFORT),
            MAX_TRIALS,
            may_go_on=self._may_go_on,
            first_guess=first_guess,
        )
        if min(found.values()) > most and last in found and not has_imatrix and self._may_go_on():
            found[last] = min(found[last], measure("best", last))
        self.measured = found

    def finish(self, folder: Path, seconds_by_phase: dict[str, float]) -> Report:
        """Move the chosen trial into ``folder``, and add the search to its report, whose time is that of all phases.

        Whether the goal was met is the last of the report's gates.
        """
        chosen = self._best()
        for path in chosen.folder.iterdir():
            path.replace(folder / path.name)
        report = read_report(folder)
        result = self._result(chosen)
        gates, verdict = tuple(self._gates(chosen, result)), report.summary.verdict
        if verdict is not None:  # the goal's own advice takes the place of that on a poor result
            own = {} if verdict.level not in POOR else {"advice": None, "steps": ()}
            missed = [gate for gate in gates if gate.status == "fail"]
            assert report.quality is not None  # there is a verdict on it
            verdict = with_failed_gates(verdict, report.quality, missed).replace(**own)
        changes = {
            "verdict": verdict,
            "total_s": round(sum(seconds_by_phase.values()), 2),
            "seconds_by_phase": seconds_by_phase,
            "goal": GoalSummary(is_met=result.is_met, why=result.why),
            "gate": self.task.gate,
            "gates": (*report.summary.gates, *gates),
        }
        summary = report.summary.model_copy(update=changes)
        report = report.model_copy(update={"summary": summary, "goal": result})
        done = read_task(self.work_dir / f"{chosen.folder.name}.task.json")
        write_report(done.model_copy(update={"output_dir": self.task.output_dir}), folder, report)
        seal(folder)
        return report

    def _other_bytes(self) -> int:
        """Return the largest number of bytes that the files of a result have beside its weights; 0 on other ranks."""
        if not self.ranks.is_first:
            return 0
        found = []
        for _, plan in self.fit.plans.values():
            with tempfile.TemporaryDirectory(prefix="files-") as folder:
                nowhere = SavePoint(None, "", ALONE)
                context = RunContext(self.task, self.model, plan, Path(folder), silence, nowhere)
                found.append(other_bytes(self.fit.export, context))
        return max(found)

    def _units(self) -> tuple[list[Unit], int]:
        """Return the units with the bytes and the loss of each scheme, and the bytes outside of them."""

        def find() -> dict[str, Any]:
            windows_NT, _ = read_texts(self.model.folder, self.task.calibration)
            self.emit(PhaseStarted("sensitivity"))
            with tempfile.TemporaryDirectory(prefix="sensitivity-", dir=self.work_dir) as scratch:
                model, pieces_NT = open_model(self.model), in_pieces(windows_NT)
                sensitivity = Sensitivity(model, pieces_NT, self.fit.plans, Path(scratch), self.emit)
                losses = sensitivity.losses(self.task.calibration.seed)
            units = units_of(self.model, self.fit.plans, losses, may_keep=False)
            return {"units": [asdict(unit) for unit in units], "outside": bytes_outside_of(self.fit.plans, units)}

        known = self._once(f"units-{_digest(self._identity())}", find)
        units = [
            Unit(**{**unit, "layers": tuple(unit["layers"]), "options": tuple(Option(**o) for o in unit["options"])})
            for unit in known["units"]
        ]
        return units, known["outside"]

    def _measure(self, units: Sequence[Unit], configs: dict[str, Config], effort: Effort, index: int) -> float:
        """Quantize the candidate ``index`` as a job; return the KL divergence at its interval's unfavourable end."""
        mix = self.frontier[index]
        config = config_of(mix, units, configs)
        chain = self.task.config.algo_config or recipe([config], effort)  # the job's own is an importance matrix
        config = replace(config, algo_config=chain)
        name = f"trial-{_digest([self._identity(), config.to_dict()])}"
        trial = self.task.model_copy(
            update={
                "goal": None,
                "config": config,
                "export": (self.fit.export,),
                "output_dir": self.work_dir / name,
                "resume_dir": self.work_dir / f"resume-{name}",
                "gate": "off" if self.task.gate == "off" else "warn",
            }
        )
        self.emit(PhaseStarted("trial"))
        self.emit(Progress("trial", len(self.tried), MAX_TRIALS, "candidate"))
        run = partial(self._run_trial, trial, mix, units)
        self.tried.append(_Tried(GoalTrial.model_validate(self._once(name, run)), trial.output_dir, run))
        self.emit(CandidateMeasured(self.tried[-1].row.to_dict()))
        self._drop_all_but(self._best())
        return self.tried[-1].loss

    def _run_trial(self, trial: Task, mix: Mix, units: Sequence[Unit]) -> dict[str, Any]:
        began = time.monotonic()
        shutil.rmtree(trial.output_dir, ignore_errors=True)  # from a stop between the job's end and its note
        report = job.run(trial, _without_end(self.emit), self.ranks)
        if report is None:
            return {}
        assert report.quality is not None and trial.output_dir.is_dir()
        (self.work_dir / f"{trial.output_dir.name}.task.json").write_text(trial.model_dump_json(), "utf-8")
        kl, layers = report.quality.divergence.kl_mean, Counter[str]()
        for unit, option in zip(units, mix.chosen, strict=True):
            layers[option.scheme] += len(unit.layers)
        worst = math.inf if kl.value is None else kl.value + kl.half_interval
        return GoalTrial(
            size_bytes=report.summary.size_after_bytes,
            recovery=math.exp(-worst),
            kl=kl,
            layers=dict(layers),
            algorithms=algorithms_text(report.config),
            verdict=report.summary.verdict,
            seconds=round(time.monotonic() - began, 1),
            is_chosen=False,
        ).to_dict()

    def _once(self, name: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the JSON data that ``find`` gives on the first rank, or gave before, in this search or another one.

        A trial runs on all ranks.
        """
        note = self.work_dir / f"{name}.json"
        before = json.loads(note.read_text("utf-8")) if self.ranks.is_first and note.exists() else None
        if before := self.ranks.share(before):
            return dict(before)
        runs_here = self.ranks.is_first or name.startswith("trial")
        cache = BaselineCache(model_identity(self.task), self.ranks)
        found = cache.value({"goal": name}, lambda: find() if runs_here else {})
        if self.ranks.is_first:
            unfinished = note.with_suffix(".partial")
            unfinished.write_text(json.dumps(found), "utf-8")
            unfinished.replace(note)
        return self.ranks.share(found)

    def _best(self) -> _Tried:
        """Return the smallest trial that meets the goal; if none does, the one that loses least."""
        most = self.goal.max_divergence
        good = [trial for trial in self.tried if most is not None and trial.loss <= most]
        return min(good, key=lambda trial: trial.row.size_bytes) if good else min(self.tried, key=lambda t: t.loss)

    def _drop_all_but(self, best: _Tried) -> None:
        if self.ranks.is_first:
            for trial in self.tried:
                if trial.folder != best.folder:
                    shutil.rmtree(trial.folder, ignore_errors=True)

    def _may_go_on(self) -> bool:
        """Return whether another trial, as long as the longest, ends in time."""
        longest = max((trial.row.seconds for trial in self.tried), default=0.0)
        limit = self.goal.max_time_s
        self.is_out_of_time = self.ranks.share(limit is not None and time.monotonic() - self.started + longest > limit)
        return not self.is_out_of_time

    def _identity(self) -> list[Any]:
        """Return what decides estimates and trials beside a candidate's config. Another goal may share it."""
        task = self.task.model_copy(update={"goal": None, "export": (self.fit.export,)})
        return [fingerprint(task), {name: config.to_dict() for name, (config, _) in self.fit.plans.items()}]

    def _result(self, chosen: _Tried) -> GoalResult:
        most = self.goal.max_divergence
        is_met = most is None or chosen.loss <= most
        expected = [math.exp(-predict(self.points, self.measured, index)) for index in range(len(self.points))]
        step = max(1, len(self.points) // SHOWN_POINTS)
        return GoalResult(
            asked=self.goal.model_dump(mode="json", exclude_none=True),
            max_bytes=self.fit.max_bytes,
            kv_cache=self.fit.kv_cache,
            cache_bytes=self.fit.cache_bytes,
            is_met=is_met,
            why=self._why(chosen, is_met=is_met),
            advice=tuple(self._advice(chosen, expected)),
            trials=tuple(trial.row.model_copy(update={"is_chosen": trial is chosen}) for trial in self.tried),
            frontier=tuple(
                GoalPoint(size_bytes=self.points[index].num_bytes, recovery=expected[index])
                for index in sorted({*range(0, len(self.points), step), len(self.points) - 1})
            ),
        )

    def _gates(self, chosen: _Tried, result: GoalResult) -> Iterator[GateResult]:
        """Yield whether the goal was met as a gate, if it says what must be kept and gates are judged."""
        if self.task.gate != "off" and self.goal.min_recovery != "best":
            yield GateResult(
                gate="G16",
                name="recovery",
                status="pass" if result.is_met else "fail",
                value=chosen.row.recovery,
                limit=self.goal.min_recovery,
                detail=result.why,
            )

    def _why(self, chosen: _Tried, *, is_met: bool) -> str:
        size, kept = megabytes(chosen.row.size_bytes), f"{100 * chosen.row.recovery:.2f} %"
        if self.goal.min_recovery == "best":
            return f"the best result that fits: it keeps at least {kept} in {size}"
        wanted = f"{100 * self.goal.min_recovery:g} %"
        if is_met:
            which = "the smallest measured result that" if len(self.tried) > 1 else "the first measured result"
            return f"{which} keeps {wanted}: {kept} in {size}"
        within = f" within {self.goal.max_time_s} s" if self.is_out_of_time else ""
        return f"no measured result that fits keeps {wanted}{within}; this is the best: {kept} in {size}"

    def _advice(self, chosen: _Tried, expected: Sequence[float]) -> Iterator[str]:
        """Yield what other sizes would give, as far as they fit and are clearly better or smaller."""
        if self.is_out_of_time:
            yield "more time: a job with the same goal reuses these measurements"
        told = {chosen.row.size_bytes}
        for share in ADVICE_STEPS:
            wanted = share * chosen.row.size_bytes
            index = min(range(len(self.points)), key=lambda i: abs(self.points[i].num_bytes - wanted))
            size = self.points[index].num_bytes
            if abs(size - wanted) < 0.05 * wanted and size not in told:
                told.add(size)
                change = 100 * (size / chosen.row.size_bytes - 1)
                yield f"{megabytes(size)} ({change:+.0f} %): expect {100 * expected[index]:.1f} %"


def _check_kind(model_config: dict[str, Any]) -> None:
    kind = kind_of(model_config)
    if kind is not Kind.causal:
        raise ConfigError(
            f"Goals only work with causal language models; this model is of kind '{kind}'.",
            code="unsupported_config",
            hint="Choose a scheme by hand (--quant_scheme).",
            field="/goal",
        )


def _without_end(emit: Emit) -> Emit:
    """Return an ``emit`` that leaves out the end of a trial: the job goes on."""
    return lambda event: None if isinstance(event, Completed) else emit(event)


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:12]
