"""What the routes do, without HTTP: understand a request, plan it, find an artifact's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from api.http.deps import Context
from api.http.errors import Problem
from api.jobs import calibration, models, targets
from api.jobs.models import ReadHeaders
from api.jobs.schemas import HardwareRef, JobCreate, PlanCreate, PlanOn, PresetConfig, PublishTo
from api.jobs.targets import Checked
from api.store import manifest
from api.store.accounts.audit import Caller
from api.store.manifest import Manifest, ManifestFile
from api.store.tables.jobs import Artifact
from quantcore.checkpoint.headers import ModelHeaders
from quantcore.config import presets
from quantcore.config.presets import Preset
from quantcore.config.quantization import CalibrationConfig, Config
from quantcore.config.quark import read_config
from quantcore.config.task import Evaluation, ResolvedMix, check_mix
from quantcore.errors import ConfigError, QuantError
from quantcore.mixed_precision import schemes
from quantcore.plan import resolve as plan
from quantcore.plan.capacity import Capacity, capacity
from quantcore.plan.hardware import parse_hardware
from quantcore.plan.resolve import Plan

_BODY_FIELDS = frozenset({*JobCreate.model_fields, *PlanOn.model_fields})


@dataclass(frozen=True)
class Planned:
    """A request that will work: what is stored of it, and the plan."""

    model: dict[str, Any]
    preset: str | None
    config: Config
    calibration: CalibrationConfig
    plan: Plan
    headers: ModelHeaders
    mix: ResolvedMix | None = None
    publish: dict[str, Any] | None = None
    evaluation: Evaluation | None = None

    def to_dict(self) -> dict[str, Any]:
        """What a plan answers with."""
        answer = self.plan.to_dict() | {"config": self.config.to_dict(), "preset": self.preset}
        of_job = {
            "mix": self.mix and self.mix.asked,
            "publish": self.publish,
            "evaluation": self.evaluation and stored(self.evaluation),
        }
        return answer | {name: value for name, value in of_job.items() if value}


CheckTarget = Callable[[PublishTo], Checked]
Locate = Callable[[CalibrationConfig], CalibrationConfig]


def make_plan(
    request: PlanCreate, context: Context, caller: Caller, *, read: ReadHeaders | None = None,
    locate: Locate | None = None,
) -> Planned:  # fmt: skip
    """Resolve the request against the model's headers, which ``read`` may know already, as ``locate`` the text.

    Raises QuantError whose ``field`` points into the request.
    """
    try:
        known = known_presets(context.settings.presets_file)
        mix = None if request.mix is None else schemes.resolve(request.mix, known)
        preset, config = _parse_config(request.config if mix is None else _beside_mix(request.config), known)
        if mix is not None:
            check_mix(config, file2file=request.file2file)
        text = (locate or calibration.locator(context, caller))(request.calibration)
        model, headers = (read or models.reader(context, caller))(request.model)

        def plan_of(config: Config) -> Plan:
            return plan.resolve(
                config, headers.config, headers.tensors, calibration=text, exports=request.export,
                evaluation=request.evaluation if isinstance(request, JobCreate) else None,
                file2file=request.file2file, shard_blocks=request.shard_blocks, warnings=headers.warnings,
                num_schemes=len(mix.schemes) if mix else 0,
            )  # fmt: skip

        if mix is None:
            resolved = plan_of(config)
        else:
            resolved = schemes.upper_bound(mix, schemes.plan_each(mix, plan_of, config.algo_config))
    except QuantError as error:
        error.field = _pointer(error.field, request.config)
        raise
    return Planned(model, preset, config, text, resolved, headers, mix)


def make_capacity(planned: Planned, given: HardwareRef) -> Capacity:
    """What the plan needs of hardware. Raises ConfigError whose ``field`` points into the request."""
    hardware = parse_hardware(given.devices, given.nodes, given.host_memory, given.disk)
    headers, resolved = planned.headers, planned.plan
    return capacity(resolved, planned.config, headers.config, headers.tensors, [1] * resolved.num_blocks, hardware)


def make_job(
    request: JobCreate, context: Context, caller: Caller, *, read: ReadHeaders | None = None,
    locate: Locate | None = None, check: CheckTarget | None = None,
) -> Planned:  # fmt: skip
    """``make_plan``, what the result is measured on, and where it shall go, which ``check`` may know already."""
    locate = locate or calibration.locator(context, caller)
    planned = make_plan(request, context, caller, read=read, locate=locate)
    _check_nodes(request.nodes, planned.config)
    planned = replace(planned, evaluation=calibration.locate_evaluation(request.evaluation, locate))
    if request.publish is None:
        return planned
    named = {"hub_token": request.model.hub_token} if request.publish.to is None else {}
    asked = request.publish.model_copy(update=named) if request.publish.hub_token is None else request.publish
    checked = (check or targets.checker(context, caller))(asked)
    return replace(planned, publish=checked.stored)


def stored(settings: BaseModel) -> dict[str, Any]:
    """Settings of a request as a row holds them: every default filled in, nothing that is not there."""
    return settings.model_dump(mode="json", exclude_none=True)


def _check_nodes(nodes: int, config: Config) -> None:
    if nodes > 1 and config.runs_alone is not None:
        raise ConfigError(
            f"{config.runs_alone} works in one process, which {nodes} workers cannot share.",
            code="unsupported_config",
            hint="Leave nodes out, or take gptq or gptaq.",
            field="/nodes",
        )


def read_manifest(artifact: Artifact) -> Manifest:
    """The artifact's manifest, which must be the one that was committed. Raises ProofError ``artifact_corrupt``."""
    found = manifest.read(Path(artifact.path))
    if found.sha256 != artifact.manifest_sha256:
        raise manifest.corrupt("its manifest has changed")
    return found


def find_file(artifact: Artifact, name: str) -> tuple[Path, ManifestFile]:
    """A file of the artifact, its content checked. Only names in the manifest exist: ``..`` and friends are 404."""
    folder = Path(artifact.path)
    found = read_manifest(artifact)
    if name == manifest.MANIFEST:
        path = folder / name
        return path, ManifestFile(name, path.stat().st_size, found.sha256)
    if name not in found.files:
        raise Problem(404, "file_not_found", "The artifact has no such file.", hint="GET .../artifacts lists them.")
    file = found.files[name]
    _check_once(folder, file, _fingerprint(folder / name))
    return folder / name, file


@lru_cache(maxsize=1)
def known_presets(file: Path | None) -> Mapping[str, Preset]:
    """The built-in presets and the house's own, read once. Raises ConfigError for a broken file."""
    return presets.PRESETS if file is None else presets.read_presets(file)


def _parse_config(data: dict[str, Any], known: Mapping[str, Preset]) -> tuple[str | None, Config]:
    """{preset ...} or a whole config -> (preset's name or None, config)."""
    if "preset" not in data:
        return None, read_config(data)
    try:
        chosen = PresetConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise QuantError(
            f"The config is not valid at {first['loc'][0]}: {first['msg']}.",
            code="invalid_config",
            hint="With a preset go only group_size, exclude and kv_cache; or give a whole config without a preset.",
            field="/config/" + "/".join(map(str, first["loc"])),
        ) from error
    config = presets.resolve(
        chosen.preset,
        group_size=chosen.group_size,
        exclude=chosen.exclude,
        kv_cache=chosen.kv_cache,
        presets=known,
    )
    return chosen.preset, config


def _beside_mix(config: dict[str, Any]) -> dict[str, Any]:
    """A config that need not say a scheme (see ``check_mix``)."""
    return config if "preset" in config else {"global_quant_config": {}, **config}


def _pointer(field: str, config: dict[str, Any]) -> str:
    """The engine points into the config it was given; the client needs a pointer into the body that it sent."""
    first, *rest = field.strip("/").split("/")
    if not field or first in _BODY_FIELDS:
        return field
    if "preset" not in config:
        return f"/config{field}"
    last = (rest or [first])[-1]
    return f"/config/{last}" if last in config else "/config/preset"


def _fingerprint(path: Path) -> tuple[int, ...]:
    """Changes whenever the file does; ctime cannot be set back from outside the kernel."""
    try:
        status = path.lstat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=4096)
def _check_once(folder: Path, file: ManifestFile, fingerprint: tuple[int, ...]) -> None:
    """Hash a file when it is first asked for, not again for every range of it. Errors are not remembered."""
    manifest.check_file(folder, file)
