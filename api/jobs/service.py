"""The logic of the routes of jobs, without HTTP: understand a request, plan it, find an artifact's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from api.http.deps import Context
from api.http.errors import Problem
from api.jobs import calibration, models, targets
from api.jobs.calibration import Locate
from api.jobs.models import ReadHeaders
from api.jobs.schemas import HardwareRef, JobCreate, JobRequest, PlanCreate, PresetConfig, PublishTo
from api.jobs.targets import Checked
from api.store import manifest
from api.store.accounts.audit import Caller
from api.store.engine import reading
from api.store.manifest import Manifest, ManifestFile
from api.store.queue import remaining
from api.store.tables.jobs import Artifact
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.config import presets
from quantcore.config.job_spec import NO_SCHEME, JobOptions, JobSpec, conflicting_goal
from quantcore.config.presets import Preset
from quantcore.config.quantization import Config, parse_config
from quantcore.config.quark import read_config
from quantcore.config.recipes import with_recipe
from quantcore.errors import ConfigError, QuantError
from quantcore.goal.fitting import fit, possible_chains, upper_bound
from quantcore.goal.runtimes import MENUS
from quantcore.mixed_precision import schemes
from quantcore.plan.capacity import Capacity, capacity
from quantcore.plan.hardware import parse_hardware
from quantcore.plan.job import fitted, plan_job
from quantcore.plan.planner import Plan

_BODY_FIELDS = frozenset({*JobCreate.model_fields, *PlanCreate.model_fields})


@dataclass(frozen=True)
class Planned:
    """A request that will work: the values to store, and the plan."""

    model: dict[str, Any]
    preset: str | None
    spec: JobSpec
    plan: Plan
    headers: ModelHeaders
    publish: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the response body of a plan."""
        spec = self.spec
        answer = self.plan.to_dict() | {"config": spec.config.to_dict(), "preset": self.preset}
        answer["evaluation"] = spec.evaluation.model_dump(mode="json", exclude_none=True)
        goal = spec.goal and spec.goal.model_dump(mode="json", exclude_none=True)
        chains = spec.goal and possible_chains(spec.goal)
        more = {"mix": spec.mix and spec.mix.asked, "goal": goal, "possible_chains": chains, "publish": self.publish}
        return answer | {name: value for name, value in more.items() if value}


CheckTarget = Callable[[PublishTo], Checked]


def make_plan(
    request: JobRequest, context: Context, caller: Caller, *, read: ReadHeaders | None = None,
    locate: Locate | None = None,
) -> Planned:  # fmt: skip
    """Resolve the request against the model's headers, which ``read`` may know already, as ``locate`` the texts.

    Raises QuantError whose ``field`` points into the request.
    """
    locate = locate or calibration.locator(context, caller)
    try:
        preset, spec = _spec_of(request, known_presets(context.settings.presets_file))
        spec = spec.model_copy(update={"calibration": calibration.locate_calibration(spec.calibration, locate)})
        model, headers = (read or models.reader(context, caller))(request.model)
        spec = fitted(spec, headers.config)
        resolved = _plan_of(spec, headers)
        evaluation = calibration.locate_evaluation(spec.evaluation, locate)
    except QuantError as error:
        error.field = _pointer(error.field, request.config)
        raise
    return Planned(model, preset, spec.model_copy(update={"evaluation": evaluation}), resolved, headers)


def _spec_of(request: JobRequest, presets_by_name: Mapping[str, Preset]) -> tuple[str | None, JobSpec]:
    """Return the preset that the request names, if any, and the JobSpec that it means."""
    if request.goal is not None:
        return None, _spec_of_goal(request)
    mix = None if request.mix is None else schemes.resolve(request.mix, presets_by_name)
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
    own = {"config": request.config, "mix": request.mix, "effort": request.effort}
    if conflict := next((name for name, value in own.items() if value), None):
        raise conflicting_goal(conflict)
    options = {name: getattr(request, name) for name in JobOptions.model_fields}
    export = MENUS[request.goal.runtime].export
    if "export" in request.model_fields_set and request.export != (export,):
        raise conflicting_goal("export")
    return JobSpec(config=Config(global_quant_config=NO_SCHEME), **options | {"export": (export,)})


def _plan_of(spec: JobSpec, headers: ModelHeaders) -> Plan:
    if spec.goal is not None:
        return upper_bound(fit(spec.goal, headers, spec.calibration, spec.export))
    mix = spec.mix
    if mix is None:
        return plan_job(spec, headers)
    plans = schemes.plan_each(
        mix,
        lambda config: plan_job(spec.model_copy(update={"config": config}), headers),
        spec.config.algo_config,
    )
    return schemes.upper_bound(mix, plans)


def make_capacity(planned: Planned, given: HardwareRef) -> Capacity:
    """Compute the hardware that the plan needs. Raises ConfigError whose ``field`` points into the request."""
    hardware = parse_hardware(given.devices, given.nodes, given.host_memory, given.disk)
    headers, resolved = planned.headers, planned.plan
    config = planned.spec.config
    return capacity(resolved, config, headers.config, headers.tensors, [1] * resolved.num_blocks, hardware)


def make_job(
    request: JobCreate, context: Context, caller: Caller, *, read: ReadHeaders | None = None,
    locate: Locate | None = None, check: CheckTarget | None = None,
) -> Planned:  # fmt: skip
    """Plan the request as ``make_plan`` does, and check its target, which ``check`` may know already."""
    planned = make_plan(request, context, caller, read=read, locate=locate)
    _check_nodes(request.nodes, planned.spec.config)
    if request.publish is None:
        return planned
    named = {"hub_token": request.model.hub_token} if request.publish.to is None else {}
    target = request.publish.model_copy(update=named) if request.publish.hub_token is None else request.publish
    checked = (check or targets.checker(context, caller))(target)
    return replace(planned, publish=checked.stored)


def show(planned: Planned, context: Context, caller: Caller) -> dict[str, Any]:
    """Return the response body of a plan, with the seconds that earlier jobs of the kind took (null: there is none)."""
    with reading(context.sessions) as session:
        time_s = remaining.expect(session, caller.project_id, planned.model, planned.spec.to_dict())
    return planned.to_dict() | {"time_s": time_s}


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
        first = error.errors(include_url=False, include_input=False)[0]
        raise QuantError(
            f"The config is not valid at {first['loc'][0]}: {first['msg']}.",
            code="invalid_config",
            hint="Beside a preset, only group_size, exclude, include, towers, drafts, kv_cache and algo_config are"
            " allowed; or give a whole config without a preset.",
            field="/config/" + "/".join(map(str, first["loc"])),
        ) from error
    changes = chosen.model_dump(exclude={"preset", "algo_config"})
    config = presets.resolve(chosen.preset, **changes, presets=presets_by_name)
    if chosen.algo_config is not None:
        config = parse_config(config.to_dict() | {"algo_config": chosen.algo_config})
    return chosen.preset, config


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
