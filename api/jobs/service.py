"""The logic of the routes of jobs, without HTTP: understand a request, plan it, find an artifact's file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from api.http.deps import Context
from api.http.errors import Problem
from api.jobs import calibration, models, targets
from api.jobs.calibration import Locate
from api.jobs.schemas import HardwareRef, JobCreate, JobRequest, ModelRef, PlanCreate, PresetConfig, PublishTo
from api.jobs.targets import Checked
from api.readers import error_of
from api.store import manifest
from api.store.accounts.audit import Caller
from api.store.engine import reading
from api.store.manifest import Manifest, ManifestFile
from api.store.queue import remaining
from api.store.tables.jobs import Artifact
from quantcore.config import presets
from quantcore.config.job_spec import JobOptions, JobSpec, conflicting_goal
from quantcore.config.presets import Preset, PresetChanges
from quantcore.config.quantization import Config, parse_config
from quantcore.config.quark import read_config
from quantcore.config.recipes import with_recipe
from quantcore.config.values import sentence_of
from quantcore.errors import ConfigError, QuantError
from quantcore.plan import mix_schemes
from quantcore.plan.fitting import possible_chains
from quantcore.plan.hardware import Hardware, parse_hardware
from quantcore.plan.runtimes import SUPPORTED_SCHEMES
from quantcore.report.values import Report

_REPORT = "report.json"
_BODY_FIELDS = frozenset({*JobCreate.model_fields, *PlanCreate.model_fields})


@dataclass(frozen=True)
class Prepared:
    """A request whose scheme and texts are understood; its model has not been read. ``preset``: its name, if any."""

    request: JobRequest
    preset: str | None
    spec: JobSpec


@dataclass(frozen=True)
class Planned:
    """A request that will work: the values to store, and the plan as JSON, with ``capacity`` for given hardware."""

    model: dict[str, Any]
    preset: str | None
    spec: JobSpec
    plan: dict[str, Any]
    capacity: dict[str, Any] | None = None
    publish: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the response body of a plan."""
        spec = self.spec
        answer = self.plan | {"config": spec.config.to_dict(), "preset": self.preset}
        answer["evaluation"] = spec.evaluation.model_dump(mode="json", exclude_none=True)
        goal = spec.goal and spec.goal.model_dump(mode="json", exclude_none=True)
        chains = spec.goal and possible_chains(spec.goal, spec.config)
        more = {"mix": spec.mix and spec.mix.asked, "goal": goal, "possible_chains": chains, "publish": self.publish}
        more["capacity"] = self.capacity
        return answer | {name: value for name, value in more.items() if value}


CheckTarget = Callable[[PublishTo], Checked]


def make_plan(request: JobRequest, context: Context, caller: Caller, hardware: HardwareRef | None = None) -> Planned:
    """Resolve the request against the model's headers. Raises QuantError whose ``field`` points into the request."""
    needed = None
    if hardware is not None:
        needed = parse_hardware(hardware.devices, hardware.nodes, hardware.host_memory, hardware.disk)
    locate = calibration.locator(context, caller)
    planned = plan_all([prepare(request, context, locate)], context, caller, locate, needed)[0]
    if isinstance(planned, QuantError):
        raise planned
    return planned


def prepare(request: JobRequest, context: Context, locate: Locate) -> Prepared:
    """Understand the request as far as that needs no model. Raises QuantError as ``make_plan``."""
    with _pointing_into(request):
        preset, spec = _spec_of(request, known_presets(context.settings.presets_file))
        located = {
            "calibration": calibration.locate_calibration(spec.calibration, locate),
            "config": calibration.locate_imatrix(spec.config, context.settings),
        }
        spec = spec.model_copy(update=located)
    return Prepared(request, preset, spec)


def plan_all(
    prepared: Sequence[Prepared], context: Context, caller: Caller, locate: Locate, hardware: Hardware | None = None
) -> list[Planned | QuantError]:
    """Return the plan of each request, or the error that says why there is none. Each model is read once."""
    by_model: dict[ModelRef, list[int]] = {}
    for number, each in enumerate(prepared):
        by_model.setdefault(each.request.model, []).append(number)
    planned: dict[int, Planned | QuantError] = {}
    for model, numbers in by_model.items():
        try:
            stored, answers = models.plan(
                model, [prepared[number].spec for number in numbers], context, caller, hardware
            )
        except QuantError as error:
            planned |= dict.fromkeys(numbers, error)
            continue
        for number, answer in zip(numbers, answers, strict=True):
            try:
                with _pointing_into(prepared[number].request):
                    planned[number] = _planned(prepared[number], stored, answer, locate)
            except QuantError as error:
                planned[number] = error
    return [planned[number] for number in range(len(prepared))]


def _planned(prepared: Prepared, model: dict[str, Any], answer: dict[str, Any], locate: Locate) -> Planned:
    """Return a plan from the answer of a reader: see ``Readers.plan``. Raises the error that it describes."""
    if "error" in answer:
        raise error_of(answer["error"])
    spec = prepared.spec
    fitted = {
        "calibration": spec.calibration.model_copy(update={"seq_len": int(answer["seq_len"])}),
        "evaluation": spec.evaluation.model_copy(update={"seq_len": int(answer["evaluation_seq_len"])}),
        "export": tuple(answer["export"]),
    }
    spec = spec.model_copy(update=fitted)
    evaluation = calibration.locate_evaluation(spec.evaluation, locate)
    spec = spec.model_copy(update={"evaluation": evaluation})
    return Planned(model, prepared.preset, spec, answer["plan"], answer["capacity"])


@contextmanager
def _pointing_into(request: JobRequest) -> Iterator[None]:
    """Let the field of errors inside point into the body that the client sent."""
    try:
        yield
    except QuantError as error:
        error.field = _pointer(error.field, request.config)
        raise


def _spec_of(request: JobRequest, presets_by_name: Mapping[str, Preset]) -> tuple[str | None, JobSpec]:
    """Return the preset that the request names, if any, and the JobSpec that it means."""
    if request.goal is not None:
        return None, _spec_of_goal(request)
    mix = None if request.mix is None else mix_schemes.resolve(request.mix, presets_by_name)
    asked = request.config if mix is None else _beside_mix(request.config)
    preset, config = _parse_config(asked, presets_by_name)
    by_default = None if "algo_config" in asked or mix is not None else preset
    mixed = () if mix is None else mix.configs.values()
    config = with_recipe(config, request.effort, preset=by_default, file2file=request.file2file, mixed=mixed)
    options = {name: getattr(request, name) for name in JobOptions.model_fields}
    return preset, JobSpec(config=config, mix=mix, **options)


def _spec_of_goal(request: JobRequest) -> JobSpec:
    """Return the JobSpec of a request with a goal. Raises ConfigError for what the goal is there to choose."""
    assert request.goal is not None
    own = {"config": request.config.keys() - {"algo_config"}, "mix": request.mix, "effort": request.effort}
    if conflict := next((name for name, value in own.items() if value), None):
        raise conflicting_goal(conflict)
    config = parse_config({"global_quant_config": {}, **request.config})
    options = {name: getattr(request, name) for name in JobOptions.model_fields}
    export = SUPPORTED_SCHEMES[request.goal.runtime].export
    if "export" in request.model_fields_set and request.export != (export,):
        raise conflicting_goal("export")
    return JobSpec(config=config, **options | {"export": (export,)})


def make_job(request: JobCreate, context: Context, caller: Caller) -> Planned:
    """Plan the request as ``make_plan`` does, and check its target."""
    return with_target(request, make_plan(request, context, caller), targets.checker(context, caller))


def with_target(request: JobCreate, planned: Planned, check: CheckTarget) -> Planned:
    """Return ``planned`` with the target of the request, once ``check`` has approved it. Raises QuantError."""
    _check_nodes(request.nodes, planned.spec.config)
    if request.publish is None:
        return planned
    named = {"hub_token": request.model.hub_token} if request.publish.to is None else {}
    target = request.publish.model_copy(update=named) if request.publish.hub_token is None else request.publish
    return replace(planned, publish=check(target).stored)


def show(planned: Planned, context: Context, caller: Caller) -> dict[str, Any]:
    """Return the response body of a plan, with the seconds that earlier jobs of the kind took (null: there is none)."""
    with reading(context.sessions) as session:
        time_s, rough_time_s = remaining.expect(
            session, caller.project_id, planned.model, planned.spec.to_dict(), planned.preset
        )
    return planned.to_dict() | {"time_s": time_s, "rough_time_s": rough_time_s}


def _check_nodes(nodes: int, config: Config) -> None:
    if nodes > 1 and config.runs_alone is not None:
        raise ConfigError(
            f"{config.runs_alone} works in one process, which {nodes} workers cannot share.",
            code="unsupported_config",
            hint="Leave nodes out, or take gptq or gptaq.",
            field="/nodes",
        )


def read_manifest(artifact: Artifact) -> Manifest:
    """Return the artifact's manifest, which must be the committed one. Raises ProofError ``artifact_corrupt``."""
    contents = manifest.read(Path(artifact.path))
    if contents.sha256 != artifact.manifest_sha256:
        raise manifest.corrupt("its manifest has changed")
    return contents


def find_file(artifact: Artifact, name: str) -> tuple[Path, ManifestFile]:
    """Return a file of the artifact, its content checked. Names that are not in the manifest, as ``..``, are 404."""
    folder = Path(artifact.path)
    contents = read_manifest(artifact)
    if name == manifest.MANIFEST:
        path = folder / name
        return path, ManifestFile(name, path.stat().st_size, contents.sha256)
    if name not in contents.files:
        raise Problem(404, "file_not_found", "The artifact has no such file.", hint="GET .../artifacts lists them.")
    file = contents.files[name]
    _check_once(folder, file, _fingerprint(folder / name))
    return folder / name, file


def read_report(artifact: Artifact) -> Report | None:
    """Return the report of an artifact; None if there is none that this version can read."""
    if _REPORT not in read_manifest(artifact).files:
        return None
    path, _ = find_file(artifact, _REPORT)
    try:
        return Report.model_validate_json(path.read_bytes())
    except ValidationError:  # of an earlier version
        return None


@lru_cache(maxsize=1)
def known_presets(file: Path | None) -> Mapping[str, Preset]:
    """Return the built-in presets and the operator's own, read once. Raises ConfigError for a broken file."""
    return presets.PRESETS if file is None else presets.read_presets(file)


def _parse_config(data: dict[str, Any], presets_by_name: Mapping[str, Preset]) -> tuple[str | None, Config]:
    """Parse {preset ...} or a whole config. Returns (the preset's name or None, the config)."""
    if "preset" not in data:
        return None, read_config(data)
    try:
        chosen = PresetConfig.model_validate(data)
    except ValidationError as error:
        first, allowed = error.errors(include_url=False, include_input=False)[0], PresetChanges.model_fields
        raise QuantError(
            f"The config is not valid at {first['loc'][0]}: {sentence_of(first)}.",
            code="invalid_config",
            hint=f"Beside a preset, only {', '.join(allowed)} and algo_config are allowed; or give a whole config"
            " without a preset.",
            field="/config/" + "/".join(map(str, first["loc"])),
        ) from error
    config = chosen.apply(presets.resolve(chosen.preset, presets=presets_by_name))
    if chosen.algo_config is not None:
        config = parse_config(config.to_dict() | {"algo_config": chosen.algo_config})
    return presets.spelled(chosen.preset, presets_by_name), config


def _beside_mix(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that need not name a scheme (see ``check_mix``)."""
    return config if "preset" in config else {"global_quant_config": {}, **config}


def _pointer(field: str, config: dict[str, Any]) -> str:
    """Turn the engine's pointer into its config into a pointer into the body that the client sent."""
    first, *rest = field.strip("/").split("/")
    if not field or first in _BODY_FIELDS:
        return field
    if "preset" not in config or first == "algo_config":
        return f"/config{field}"
    last = (rest or [first])[-1]
    return f"/config/{last}" if last in config else "/config/preset"


def _fingerprint(path: Path) -> tuple[int, ...]:
    """Return numbers that change whenever the file does; ctime cannot be set back from outside the kernel."""
    try:
        status = path.lstat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=4096)
def _check_once(folder: Path, file: ManifestFile, fingerprint: tuple[int, ...]) -> None:
    """Hash a file at its first request, not again for every range of it. Errors are not remembered."""
    manifest.check_file(folder, file)
