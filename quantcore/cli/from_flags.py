"""Converts flags to a Task for this machine (``task_of``) or the body of a request to the service (``request_of``)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quantcore.cli.flags import (
    BUDGETS,
    COMPARED_TOKENS,
    CUSTOM_MODES,
    MODEL_EXPORTS,
    NODES,
    QUANT_ALGOS,
    WEIGHT_FORMATS,
    plain_options,
)
from quantcore.cli.goal_flags import GOAL_FLAGS, goal_of
from quantcore.config import presets
from quantcore.config.algorithms import RTNConfig, config_of, load_quant_algo_config_from_file
from quantcore.config.job_spec import MixConfig
from quantcore.config.presets import PresetChanges
from quantcore.config.quantization import (
    CalibrationConfig,
    Config,
    QuantizationConfig,
    parse_config,
)
from quantcore.config.quark import read_config
from quantcore.config.recipes import conflicting_effort, with_recipe
from quantcore.config.task import AdapterSource, EvaluationConfig, Task
from quantcore.config.texts import parse_sources
from quantcore.config.values import config_error
from quantcore.errors import ConfigError, unknown_value
from quantcore.export import default_format
from quantcore.hub.adapter import resolve_adapter
from quantcore.hub.download import MAIN, resolve
from quantcore.hub.names import is_remote
from quantcore.plan.mix_schemes import resolve as resolve_schemes

CALIBRATION_FLAGS = {
    "config": "dataset_config",
    "split": "dataset_split",
    "column": "dataset_column",
    "chat_template_kwargs": "chat_template_kwargs",
    "num_samples": "num_calib_data",
    "seq_len": "seq_len",
    "seed": "seed",
}
TEXT_FLAGS = {
    "num_windows": "num_eval_data",
    "seq_len": "eval_seq_len",
    "source": "eval_dataset",
    "config": "eval_dataset_config",
    "split": "eval_dataset_split",
    "column": "eval_dataset_column",
    "chat_template_kwargs": "eval_chat_template_kwargs",
    "stride": "eval_stride",
}
EVALUATION_FLAGS = TEXT_FLAGS | {
    "limit": "limit",
    "num_fewshot": "num_fewshot",
    "batch_size": "eval_batch_size",
    "num_behaviour_prompts": "behaviour",
    "behaviour_len": "behaviour_len",
}
"""The flag of each field whose value is passed on unchanged."""
CHANGE_FLAGS = {field: flag.removeprefix("--") for field, flag in PresetChanges.flags().items()}
SCHEME_FLAGS = ("quant_scheme", *CHANGE_FLAGS.values(), "layer_quant_scheme", "preset_file", "strict")
EXPORT_FLAGS = ("model_export", "custom_mode", "export_weight_format")


def task_of(options: argparse.Namespace) -> Task:
    """Return the Task of the flags. Raises ConfigError for an unknown value, with the list of the known ones."""
    if options.prompts and (options.skip_evaluation or options.file2file):
        flag = "--skip_evaluation" if options.skip_evaluation else "--file2file_quantization"
        raise ConfigError(
            f"--prompts are measured, but {flag} turns all measurements off.",
            code="unsupported_config",
            hint="Remove one of them.",
        )
    return Task(
        **model_of(options),
        adapter=_adapter_of(options),
        output_dir=Path(options.output_dir).absolute(),
        resume_dir=Path(options.resume_dir).absolute() if options.resume_dir else None,
        config=config_of_flags(options),
        calibration=calibration_of(options),
        export=exports_of(options),
        evaluation=_without_windows(options) if options.skip_evaluation else evaluation_of(options),
        **{name: getattr(options, name) for name in plain_options() if name != NODES},
    )


def _without_windows(options: argparse.Namespace) -> EvaluationConfig:
    """Return an evaluation without measurements. It keeps what was asked for beside them: the Task refuses it."""
    kept = evaluation_of(options).model_dump(include={"tasks", "num_behaviour_prompts", "kv_cache_dtypes"})
    return EvaluationConfig(num_windows=0, **kept)


def calibration_of(options: argparse.Namespace) -> CalibrationConfig:
    """Return the source and the amount of calibration text."""
    return CalibrationConfig(**_set(options, CALIBRATION_FLAGS), **parse_sources(options.dataset))


def _set(options: argparse.Namespace, flags: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the flags that have one, by field."""
    values = {field: getattr(options, flag) for field, flag in flags.items()}
    return {field: value for field, value in values.items() if value is not None}


def exports_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the formats without duplicates; none stands for the default of the scheme.

    The two other flags decide the format that ``hf_format`` stands for.
    """
    custom_mode = options.custom_mode or "quark"
    is_fake = options.export_weight_format == "fake_quantized"
    _one_of("custom_mode", [custom_mode], CUSTOM_MODES)
    _one_of("model_export", options.model_export, MODEL_EXPORTS)
    _one_of("export_weight_format", [options.export_weight_format], WEIGHT_FORMATS)
    names = options.model_export or (["hf_format"] if options.custom_mode or is_fake else [])
    if custom_mode != "quark" and "hf_format" not in names:
        raise ConfigError(
            f"--custom_mode {custom_mode} applies to hf_format, but --model_export is {', '.join(names)}.",
            code="invalid_export",
            hint=f"Use --model_export {custom_mode}, alone or with the others.",
        )
    if is_fake and "hf_format" not in names:
        raise ConfigError(
            f"--export_weight_format fake_quantized applies to hf_format, but --model_export is {', '.join(names)}.",
            code="invalid_export",
            hint="Use --model_export fake_quantized, alone or with the others.",
        )
    hf_format = "fake_quantized" if is_fake else custom_mode
    return tuple(dict.fromkeys(hf_format if name == "hf_format" else name for name in names))


def model_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields for the model: an existing folder, or a Hub id at its current commit, as in Quark's script."""
    folder = Path(options.model_dir)
    if folder.exists() or not is_remote(options.model_dir):
        if options.revision:
            raise ConfigError(
                "--revision applies only to a model on the Hub.", code="invalid_task", hint="Remove it for a folder."
            )
        return {"model_dir": folder.absolute()}
    return {"model_id": options.model_dir, "revision": resolve(options.model_dir, options.revision or MAIN)}


def _adapter_of(options: argparse.Namespace) -> AdapterSource | None:
    """Return where the adapter is: an existing folder, or an id on the Hub at its current commit."""
    name, revision = options.adapter, options.adapter_revision
    is_on_hub = name is not None and not Path(name).exists()
    if revision and not is_on_hub:
        raise ConfigError(
            "--adapter_revision applies only to an adapter on the Hub.",
            code="invalid_task",
            hint="Remove it, or name an adapter: --adapter org/name.",
        )
    if name is None:
        return None
    if is_on_hub:
        return AdapterSource(id=name, revision=resolve_adapter(name, revision or MAIN))
    return AdapterSource(folder=Path(name).absolute())


def request_of(options: argparse.Namespace, given: set[str]) -> dict[str, Any]:
    """Return the fields of a request to the service (``api.jobs.schemas.JobRequest``) without the model.

    They come from the flags in ``given`` alone: the service fills in its own defaults. Raises ConfigError.
    """
    if "prompts" in given:
        raise ConfigError(
            "The service asks its packaged prompts alone; a file of your own (--prompts) stays on this machine.",
            code="unsupported_config",
            hint="Remove it, or measure the result here: bitfoundry evaluate OUT --against MODEL --prompts FILE.",
        )
    plain = (*plain_options(), "effort")
    body: dict[str, Any] = {name: getattr(options, name) for name in plain if name in given}
    if config := _config_request(options, given):
        body["config"] = config
    if given & {*GOAL_FLAGS}:
        body["goal"] = goal_of(options).model_dump(mode="json", exclude_defaults=True)
    elif given & {"schemes", *BUDGETS}:
        body["mix"] = _mix_config(options).model_dump(mode="json", exclude_none=True)
    for field, flags in (("calibration", CALIBRATION_FLAGS), ("evaluation", EVALUATION_FLAGS)):
        if part := {name: getattr(options, flag) for name, flag in flags.items() if flag in given}:
            body[field] = part
    if "dataset" in given:
        body["calibration"] = parse_sources(options.dataset) | body.get("calibration", {})
    if "tasks" in given:
        body.setdefault("evaluation", {})["tasks"] = _names(options.tasks)
    if "kv_cache_dtypes" in given:
        body.setdefault("evaluation", {})["kv_cache_dtypes"] = options.kv_cache_dtypes
    if "skip_evaluation" in given:
        body.setdefault("evaluation", {})["num_windows"] = 0
    if given & {*EXPORT_FLAGS}:
        body["export"] = list(exports_of(options))
    return body


def _config_request(options: argparse.Namespace, given: set[str]) -> dict[str, Any]:
    """Return the config of a request; it names the preset where possible, so that lists can show it."""
    scheme, chain = given & {*SCHEME_FLAGS}, _chain(options)
    if scheme and "quant_scheme" not in given:
        raise ConfigError(
            f"--{min(scheme)} changes a scheme, but no scheme is given.",
            code="config_required",
            hint="Choose one: --quant_scheme w4a16 (see `bitfoundry presets`).",
            field="/config",
        )
    more = {} if chain is None else {"algo_config": [algorithm.to_dict() for algorithm in chain]}
    if not scheme:
        return more
    if scheme <= {"quant_scheme", *CHANGE_FLAGS.values()}:
        if not options.quant_scheme.endswith(".json"):
            changes = _changes_of(options).model_dump(mode="json", exclude_defaults=True)
            return {"preset": options.quant_scheme, **changes, **more}
        if scheme == {"quant_scheme"}:
            return _read_json(options.quant_scheme) | more
    return config_of_flags(options).to_dict()


def config_of_flags(options: argparse.Namespace) -> Config:
    """Return the config of the flags: a preset or a file, with the changes that other flags make."""
    changes = _changes_of(options)
    named = presets.PRESETS if options.preset_file is None else presets.read_presets(Path(options.preset_file))
    if options.quant_scheme.endswith(".json"):
        if changes.group_size is not None or changes.exclude is not None:
            raise ConfigError(
                "--group_size and --exclude_layers cannot be combined with a config file.",
                code="invalid_config",
                hint="Set group_size and exclude in the file, or set --quant_scheme to a preset.",
            )
        config = read_config(_read_json(options.quant_scheme))
    else:
        config = presets.resolve(options.quant_scheme, presets=named)
    config = changes.apply(config)
    layers = _with_layer_schemes(config, options.layer_quant_scheme, named)
    by_name = layers.keys() - {*(changes.exclude or ())}  # a scheme of its own for lm_head includes it
    still = tuple(pattern for pattern in config.exclude if pattern not in by_name)
    config = replace(config, layer_quant_config=layers, exclude=still)
    config = replace(config, strict=True) if options.strict else config
    chain = _chain(options)
    if chain is not None:
        return _with_algorithms(config, chain, options)
    file2file = getattr(options, "file2file", False)  # a plan for hardware chooses that by itself
    return with_recipe(config, options.effort, preset=options.quant_scheme, file2file=file2file)


def _changes_of(options: argparse.Namespace) -> PresetChanges:
    return PresetChanges(**{field: getattr(options, flag) for field, flag in CHANGE_FLAGS.items()})


def _read_json(file: str) -> dict[str, Any]:
    """Read the object in a JSON file. Raises ConfigError ``invalid_config``."""
    try:
        data = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.", code="invalid_config") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} does not contain a JSON object.", code="invalid_config")
    return data


def _with_layer_schemes(
    config: Config, pairs: Sequence[tuple[str, str]], named: Mapping[str, presets.Preset]
) -> dict[str, QuantizationConfig]:
    """Return the patterns of --layer_quant_scheme, followed by those of ``config``.

    Raises ConfigError for a pattern that has two schemes, and for a preset that sets more than the scheme of a layer.
    """
    layers: dict[str, QuantizationConfig] = {}
    for pattern, scheme in pairs:
        chosen = presets.resolve(scheme, presets=named)
        if chosen != replace(Config(global_quant_config=chosen.global_quant_config), exclude=chosen.exclude):
            raise ConfigError(
                f"--layer_quant_scheme sets only the scheme of a layer, but the preset {scheme} sets more.",
                code="invalid_config",
                hint="Use a preset with only a global_quant_config, or write a config file.",
                field="/layer_quant_config",
            )
        before = layers.get(pattern, config.layer_quant_config.get(pattern, chosen.global_quant_config))
        if before != chosen.global_quant_config:
            raise ConfigError(
                f"The pattern '{pattern}' of --layer_quant_scheme already has another scheme.",
                code="conflicting_schemes",
                hint="Use each pattern only once, and not if the config file of --quant_scheme already has it.",
                field="/layer_quant_config",
            )
        layers[pattern] = chosen.global_quant_config
    return {**layers, **config.layer_quant_config}


def _with_algorithms(config: Config, chain: list[Any], options: argparse.Namespace) -> Config:
    """Return ``config`` with the algorithms of the flags."""
    if options.effort is not None:
        raise conflicting_effort(
            f"The effort '{options.effort}' chooses the algorithms, and --quant_algo,"
            " --pre_quantization_optimization or --imatrix names them."
        )
    if chain and config.algo_config:
        raise ConfigError(
            f"{options.quant_scheme} already sets algorithms.",
            code="invalid_config",
            hint="Change its algo_config, or remove --quant_algo and --pre_quantization_optimization.",
            field="/algo_config",
        )
    return parse_config({**config.to_dict(), "algo_config": chain})


def _chain(options: argparse.Namespace) -> list[Any] | None:
    """Return the algorithms of the flags: --pre_quantization_optimization in order, then --quant_algo.

    None if no flag says anything about algorithms; --quant_algo none is an empty list.
    """
    before = options.pre_quantization_optimization
    if not (before or options.quant_algo or options.quant_algo_config_file or options.imatrix):
        return None
    named = options.quant_algo if options.quant_algo and options.quant_algo.strip() != "none" else ""
    after = [name.strip() for name in named.split(",")] if named else []
    _one_of("pre_quantization_optimization", before, QUANT_ALGOS)
    _one_of("quant_algo", after, QUANT_ALGOS)
    files = _algorithm_files(options.quant_algo_config_file)
    defaults = [config_of(name) for name in (*before, *after)]
    chain = [files.pop(type(default), default) for default in defaults]
    if files:
        name = next(iter(files.values())).name
        raise ConfigError(
            f"--quant_algo_config_file is for {name}, which is not enabled.",
            code="invalid_algo_config",
            hint=f"Enable it: --quant_algo {','.join((*after, name))}.",
        )
    return chain if options.imatrix is None else with_imatrix(chain, options.imatrix)


def with_imatrix(chain: list[Any], file: str) -> list[Any]:
    """Return the chain that uses an importance matrix: rtn alone, which may be named or not."""
    if unable := [algorithm.name for algorithm in chain if not isinstance(algorithm, RTNConfig)]:
        raise ConfigError(
            f"--imatrix has the mean square of each input, and {unable[0]} needs more: {unable[0]} cannot use it.",
            code="invalid_algo_config",
            hint=f"Leave --imatrix out, so that {unable[0]} learns from calibration data; or leave {unable[0]} out:"
            " rtn then chooses the ranges.",
            field="/algo_config",
        )
    return [replace(algorithm, imatrix=str(Path(file).absolute())) for algorithm in chain or [RTNConfig()]]


def _algorithm_files(pairs: Sequence[tuple[str, str]]) -> dict[type, Any]:
    """Read the configs in the files of --quant_algo_config_file, by their class."""
    _one_of("quant_algo_config_file", [name for name, _ in pairs], QUANT_ALGOS)
    configs: dict[type, Any] = {}
    for name, path in pairs:
        algorithm = load_quant_algo_config_from_file(path)
        if type(algorithm) is not type(config_of(name)) or type(algorithm) in configs:
            fault = f"the file is for {algorithm.name}" if type(algorithm) not in configs else "so is an earlier file"
            raise ConfigError(
                f"--quant_algo_config_file names {path} for {name}, but {fault}.",
                code="invalid_algo_config",
                hint="Use the algorithm named in the file, and one file per algorithm.",
            )
        configs[type(algorithm)] = algorithm
    return configs


def _one_of(flag: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    for value in values or ():
        if value not in allowed:
            raise unknown_value(f"--{flag}", value, allowed, code=f"unknown_{flag}")


def evaluation_of(options: argparse.Namespace) -> EvaluationConfig:
    """Return the evaluation of the flags. Raises ConfigError ``invalid_evaluation``."""
    return _evaluation(
        _set(options, EVALUATION_FLAGS)
        | {
            "tasks": _names(options.tasks),
            "kv_cache_dtypes": getattr(options, "kv_cache_dtypes", None) or (),  # not every command has this flag
            "include_path": Path(options.include_path).absolute() if options.include_path else None,
            "prompts": Path(options.prompts).absolute() if options.prompts else None,
        }
    )


def compared_text_of(options: argparse.Namespace) -> EvaluationConfig:
    """Return the text of ``compare``, by default COMPARED_TOKENS long. Raises ConfigError ``invalid_evaluation``."""
    evaluation = _evaluation(_set(options, TEXT_FLAGS))
    if options.num_eval_data is not None:
        return evaluation
    num_more = max(0, COMPARED_TOKENS - evaluation.seq_len) // (evaluation.stride or evaluation.seq_len)
    return evaluation.model_copy(update={"num_windows": 1 + num_more})


def _evaluation(values: dict[str, Any]) -> EvaluationConfig:
    try:
        return EvaluationConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(
            error,
            "The evaluation",
            code="invalid_evaluation",
            hint="See docs/how-to/evaluate.md.",
            prefix="/evaluation",
        ) from error


def _names(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _mix_config(options: argparse.Namespace) -> MixConfig:
    schemes = [name.strip() for text in options.schemes or () for name in text.split(",") if name.strip()]
    return MixConfig(schemes=tuple(schemes), **{name: getattr(options, name) for name in BUDGETS})


def mix_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``engine.mixed_precision.command.mix``. Raises ConfigError."""
    export = options.model_export
    _one_of("model_export", [export] if export else [], MODEL_EXPORTS)
    named = presets.PRESETS if options.preset_file is None else presets.read_presets(Path(options.preset_file))
    asked = resolve_schemes(_mix_config(options), named)
    if export is None:
        export = default_format(*asked.configs.values())
    return {
        "asked": asked,
        "calibration": calibration_of(options),
        "export": "quark" if export == "hf_format" else export,
    }
