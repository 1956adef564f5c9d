"""The flags of ``bitfoundry quantize``, those of AMD Quark's quantization script, and the Task that they say."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quantcore.config import presets
from quantcore.config.algorithms import algorithm_names, config_of, load_quant_algo_config_from_file
from quantcore.config.quantization import (
    DEFAULT_SHARD_SIZE,
    CalibrationConfig,
    Config,
    QuantizationConfig,
    parse_config,
)
from quantcore.config.quark import read_config
from quantcore.config.task import GATES, EvaluationConfig, MixConfig, Task
from quantcore.config.values import config_error
from quantcore.errors import ConfigError, unknown_value
from quantcore.export import EXPORTERS
from quantcore.hub.download import is_model_id, resolve
from quantcore.mixed_precision.schemes import resolve as resolve_schemes
from quantcore.serving.stopwatch import RUNTIMES

CUSTOM_MODES = ("quark", "fp8", "awq")
MODEL_EXPORTS = ("hf_format", *EXPORTERS)
WEIGHT_FORMATS = ("real_quantized", "fake_quantized")
QUANT_ALGOS = (*algorithm_names(), "smooth")  # AMD Quark's config files say smooth, its flags smoothquant


def task_of(options: argparse.Namespace) -> Task:
    """The flags as a Task. Raises ConfigError for a value that is not there (yet), with the list of what is."""
    return Task(
        **_model(options),
        output_dir=Path(options.output_dir).absolute(),
        resume_dir=Path(options.resume_dir).absolute() if options.resume_dir else None,
        config=config_of_flags(options),
        calibration=calibration_of(options),
        export=exports_of(options),
        evaluation=_without_windows(options) if options.skip_evaluation else evaluation_of(options),
        gate=options.gate,
        max_shard_size=options.max_shard_size,
        file2file=options.file2file_quantization,
        shard_blocks=options.shard_blocks,
    )


def _without_windows(options: argparse.Namespace) -> EvaluationConfig:
    """Nothing is measured. Tasks that are named all the same are kept, so that the Task refuses them."""
    return EvaluationConfig(num_windows=0, tasks=evaluation_of(options).tasks)


def calibration_of(options: argparse.Namespace) -> CalibrationConfig:
    """Which text, and how much of it."""
    return CalibrationConfig(
        source=options.dataset,
        config=options.dataset_config,
        split=options.dataset_split,
        column=options.dataset_column,
        num_samples=options.num_calib_data,
        seq_len=options.seq_len,
        seed=options.seed,
    )


def exports_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The formats, each once; ``hf_format`` is the one that the two other flags say."""
    _one_of("custom_mode", [options.custom_mode], CUSTOM_MODES)
    _one_of("model_export", options.model_export, MODEL_EXPORTS)
    _one_of("export_weight_format", [options.export_weight_format], WEIGHT_FORMATS)
    names = options.model_export or ["hf_format"]
    if options.custom_mode != "quark" and "hf_format" not in names:
        raise ConfigError(
            f"--custom_mode {options.custom_mode} is about hf_format, but --model_export says {', '.join(names)}.",
            code="invalid_export",
            hint=f"Give --model_export {options.custom_mode}, beside the others or alone.",
        )
    is_fake = options.export_weight_format == "fake_quantized"
    if is_fake and "hf_format" not in names:
        raise ConfigError(
            f"--export_weight_format fake_quantized is about hf_format, but --model_export says {', '.join(names)}.",
            code="invalid_export",
            hint="Give --model_export fake_quantized, beside the others or alone.",
        )
    hf_format = "fake_quantized" if is_fake else options.custom_mode
    return tuple(dict.fromkeys(hf_format if name == "hf_format" else name for name in names))


def _model(options: argparse.Namespace) -> dict[str, Any]:
    """A folder as it is; else what looks like a Hub id is one, as in the script of Quark, at the commit it has now."""
    folder = Path(options.model_dir)
    if folder.exists() or not is_model_id(options.model_dir):
        if options.revision:
            raise ConfigError(
                "--revision goes with a model on the Hub.", code="invalid_task", hint="Leave it out for a folder."
            )
        return {"model_dir": folder.absolute()}
    return {"model_id": options.model_dir, "revision": resolve(options.model_dir, options.revision or "main")}


def config_of_flags(options: argparse.Namespace) -> Config:
    """The config of the flags: a preset or a file, then what single flags change of it."""
    exclude = None if options.exclude_layers is None else tuple(options.exclude_layers)
    known = presets.PRESETS if options.preset_file is None else presets.read_presets(Path(options.preset_file))
    if options.quant_scheme.endswith(".json"):
        if options.group_size is not None or exclude is not None:
            raise ConfigError(
                "A config file says its own group_size and exclude.",
                code="invalid_config",
                hint="Change them in the file, or give --quant_scheme the name of a preset.",
            )
        try:
            config = read_config(json.loads(Path(options.quant_scheme).read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{options.quant_scheme} cannot be read: {error}.", code="invalid_config") from error
    else:
        config = presets.resolve(options.quant_scheme, group_size=options.group_size, exclude=exclude, presets=known)
    config = replace(config, layer_quant_config=_with_layer_schemes(config, options.layer_quant_scheme, known))
    config = presets.with_kv_cache(config, options.kv_cache_dtype) if options.kv_cache_dtype else config
    config = replace(config, strict=True) if options.strict else config
    return _with_algorithms(config, options)


def _with_layer_schemes(
    config: Config, given: Sequence[tuple[str, str]], known: Mapping[str, presets.Preset]
) -> dict[str, QuantizationConfig]:
    """The patterns of --layer_quant_scheme, and those of ``config`` behind them.

    Raises ConfigError for a pattern that has two schemes, and for a preset that says more than the scheme of a layer.
    """
    named: dict[str, QuantizationConfig] = {}
    for pattern, scheme in given:
        chosen = presets.resolve(scheme, presets=known)
        if chosen != replace(Config(global_quant_config=chosen.global_quant_config), exclude=chosen.exclude):
            raise ConfigError(
                f"--layer_quant_scheme takes the scheme of a layer, and the preset {scheme} says more than that.",
                code="invalid_config",
                hint="Take a preset that is a global_quant_config alone, or write a config file.",
                field="/layer_quant_config",
            )
        before = named.get(pattern, config.layer_quant_config.get(pattern, chosen.global_quant_config))
        if before != chosen.global_quant_config:
            raise ConfigError(
                f"The pattern '{pattern}' of --layer_quant_scheme has another scheme already.",
                code="conflicting_schemes",
                hint="Give each pattern once, and leave it out where --quant_scheme is a file that says it.",
                field="/layer_quant_config",
            )
        named[pattern] = chosen.global_quant_config
    return {**named, **config.layer_quant_config}


def _with_algorithms(config: Config, options: argparse.Namespace) -> Config:
    """``config`` with the chain of the flags: --pre_quantization_optimization as given, then --quant_algo."""
    before = options.pre_quantization_optimization
    after = [name.strip() for name in options.quant_algo.split(",")] if options.quant_algo else []
    _one_of("pre_quantization_optimization", before, QUANT_ALGOS)
    _one_of("quant_algo", after, QUANT_ALGOS)
    files = _algorithm_files(options.quant_algo_config_file)
    defaults = [config_of(name) for name in (*before, *after)]
    chain = [files.pop(type(default), default) for default in defaults]
    if files:
        name = next(iter(files.values())).name
        raise ConfigError(
            f"--quant_algo_config_file is for {name}, which is not asked for.",
            code="invalid_algo_config",
            hint=f"Add it: --quant_algo {','.join((*after, name))}.",
        )
    if chain and config.algo_config:
        raise ConfigError(
            f"{options.quant_scheme} says its own algorithms.",
            code="invalid_config",
            hint="Change its algo_config, or leave out --quant_algo and --pre_quantization_optimization.",
            field="/algo_config",
        )
    return parse_config({**config.to_dict(), "algo_config": chain}) if chain else config


def _algorithm_files(given: Sequence[tuple[str, str]]) -> dict[type, Any]:
    """The configs in the files of --quant_algo_config_file, by their class."""
    _one_of("quant_algo_config_file", [name for name, _ in given], QUANT_ALGOS)
    found: dict[type, Any] = {}
    for name, path in given:
        algorithm = load_quant_algo_config_from_file(path)
        if type(algorithm) is not type(config_of(name)) or type(algorithm) in found:
            fault = f"the file says {algorithm.name}" if type(algorithm) not in found else "a file before says so, too"
            raise ConfigError(
                f"--quant_algo_config_file says that {path} is for {name}, and {fault}.",
                code="invalid_algo_config",
                hint="Give the name that stands in the file, and one file for each algorithm.",
            )
        found[type(algorithm)] = algorithm
    return found


def _one_of(flag: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for value in given or ():
        if value not in allowed:
            raise unknown_value(f"--{flag}", value, allowed, code=f"unknown_{flag}")


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.exists() or not path.absolute().parent.is_dir():
        fault = "exists already" if path.exists() else "would lie in a folder that does not exist"
        raise argparse.ArgumentTypeError(f"{text} {fault}")
    return path


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def parser() -> argparse.ArgumentParser:
    scheme_names = ", ".join(presets.PRESETS)
    flags = argparse.ArgumentParser(
        prog="bitfoundry quantize",
        description="Quantize a language model, prove the result, write it. Nothing is overwritten.",
        epilog="Schemes: " + scheme_names + "; the names of AMD Quark (w_fp8_a_fp8, ...) work as well.",
        allow_abbrev=False,
    )
    add = flags.add_argument
    add(
        "--model_dir",
        required=True,
        help="folder with config.json, tokenizer and *.safetensors; or a model on the Hugging Face Hub: org/name",
    )
    add("--revision", help="branch, tag or commit of a model on the Hub (default: main)")
    add("--output_dir", required=True, help="folder to create")
    add(
        "--resume_dir",
        help="folder on the same disk for what a stopped run needs: the same command again goes on behind its last"
        " block. Removed at the end (not for GGUF)",
    )
    add(
        "--file2file_quantization",
        action="store_true",
        help="weight after weight from file to file, for schemes that need no data: no model is run (nor measured), so"
        " that any architecture will do",
    )
    add(
        "--shard_blocks",
        action=argparse.BooleanOptionalAction,
        help="under torchrun: every process holds a slice of each block instead of all of it (default: where memory is"
        " short)",
    )
    add_scheme(flags)
    add(
        "--max_shard_size",
        default=DEFAULT_SHARD_SIZE,
        help=f"of each file of weights, as 500MB or 5GB (default: {DEFAULT_SHARD_SIZE}); gguf is one file",
    )
    add("--skip_evaluation", action="store_true", help="nothing is measured but what the proof needs")
    add_evaluation(flags)
    add("--gate", choices=GATES, default="warn", help="what a missed limit means: fail keeps the result apart")
    add("--json", action="store_true", help="events as JSON lines on stdout instead of a progress bar")
    return flags


def add_scheme(flags: argparse.ArgumentParser) -> None:
    """What is quantized how, after what text, into which formats."""
    add = flags.add_argument
    add(
        "--quant_scheme",
        default="fp8",
        help="a preset, or a config .json in the names of docs/config.md (default: fp8)",
    )
    _add_algorithms(flags)
    add("--kv_cache_dtype", help=f"one of: {', '.join(presets.KV_CACHE_SPECS)} (default: not quantized)")
    add(
        "--layer_quant_scheme",
        nargs=2,
        action="append",
        default=[],
        metavar=("PATTERN", "SCHEME"),
        help="another preset for the layers that a glob matches; repeat for several, the first match counts",
    )
    add("--preset_file", help="JSON with presets of your own")
    add("--exclude_layers", nargs="*", help="globs of layers to keep (default: lm_head)")
    add("--strict", action="store_true", help="a pattern that fits no layer is an error, and not only a warning")
    add("--group_size", type=int, help="for schemes with groups; -1 is the whole row")
    _add_calibration(flags)
    add("--custom_mode", default="quark", help=f"one of: {', '.join(CUSTOM_MODES)}")
    add("--model_export", action="append", help=f"repeat for several: {', '.join(MODEL_EXPORTS)} (default: hf_format)")
    add(
        "--export_weight_format",
        default="real_quantized",
        help=f"of hf_format, one of: {', '.join(WEIGHT_FORMATS)} (default: real_quantized)",
    )


def add_hardware(flags: argparse.ArgumentParser) -> None:
    """What a job is planned for."""
    add = flags.add_argument
    add("--devices", default="", help="of each node: 8x80GB is eight of 80 GB (default: none, the CPU)")
    add("--nodes", type=int, default=1, help="machines alike (default: 1)")
    add("--host_memory", default="", help="of each node, as 1TB (default: not checked)")
    add("--disk", default="", help="free where model and output lie, as 4TB (default: not checked)")


def add_evaluation(flags: argparse.ArgumentParser) -> None:
    """The flags that ``evaluation_of`` reads."""
    usual = EvaluationConfig()
    add = flags.add_argument
    add("--tasks", help="comma list of tasks of lm-evaluation-harness (bitfoundry[eval]), run beside the perplexity")
    add("--eval_batch_size", type=_positive, default=usual.batch_size, help="of these tasks (default: 8)")
    add("--limit", type=_positive, help="documents of each task (default: all)")
    add("--num_fewshot", type=int, help="examples before each question (default: the task's own)")
    add("--include_path", help="a folder with YAML files of more tasks")
    add("--eval_dataset", help="text to measure on: a file or a Hub dataset (default: what calibration leaves)")
    add("--eval_dataset_config", help="of a Hub dataset (default: the one that there is)")
    add("--eval_dataset_split", help="of a Hub dataset (default: train)")
    add("--eval_dataset_column", help="where its text is, or the chat (default: text, else messages)")
    add("--eval_stride", type=_positive, help="tokens from one window of that text to the next (default: no overlap)")
    add("--num_eval_data", type=_positive, default=usual.num_windows, help="windows of text (default: 12)")
    add("--eval_seq_len", type=_positive, default=usual.seq_len, help="tokens of each (default: 512)")


def evaluation_of(options: argparse.Namespace) -> EvaluationConfig:
    """Raises ConfigError ``invalid_evaluation``."""
    try:
        return EvaluationConfig.model_validate(
            {
                "num_windows": options.num_eval_data,
                "seq_len": options.eval_seq_len,
                "source": options.eval_dataset,
                "config": options.eval_dataset_config,
                "split": options.eval_dataset_split,
                "column": options.eval_dataset_column,
                "stride": options.eval_stride,
                "tasks": tuple(name.strip() for name in options.tasks.split(",")) if options.tasks else (),
                "limit": options.limit,
                "num_fewshot": options.num_fewshot,
                "include_path": Path(options.include_path).absolute() if options.include_path else None,
                "batch_size": options.eval_batch_size,
            }
        )
    except ValidationError as error:
        raise config_error(
            error, "The evaluation", code="invalid_evaluation", hint="See docs/evaluation.md.", prefix="/evaluation"
        ) from error


def add_speed(flags: argparse.ArgumentParser) -> None:
    """What a program is to serve, and which one."""
    add = flags.add_argument
    add("--runtime", choices=RUNTIMES, help="the program (default: llama_cpp for GGUF files, else transformers)")
    add(
        "--python",
        default=sys.executable,
        help="the interpreter of the environment where the program is installed (default: this one)",
    )
    add("--prompt_len", type=_positive, default=256, help="tokens of each prompt (default: 256)")
    add("--num_new", type=_positive, default=64, help="tokens to write after each, 2 or more (default: 64)")
    add("--batch_size", type=_positive, default=1, help="prompts at a time (default: 1)")
    add("--repeats", type=_positive, default=3, help="of which the median counts (default: 3)")


def add_mix(flags: argparse.ArgumentParser) -> None:
    """The flags that ``mix_of`` reads."""
    add = flags.add_argument
    add("--schemes", nargs="+", required=True, help="presets to choose from; 'keep' leaves a layer as it is")
    budget = flags.add_mutually_exclusive_group(required=True)
    budget.add_argument("--max_size", help="of all weights, as 90MB: the best mix of that size")
    budget.add_argument("--max_bits", type=float, help="a weight in the layers that are mixed, with scales: as 4.5")
    budget.add_argument(
        "--max_divergence", type=float, help="mean KL in nats a token: the smallest mix as good as that"
    )
    add("--output", type=_new_file, metavar="FILE", help="where the config goes, as mix.json; nothing is overwritten")
    add("--preset_file", help="JSON with presets of your own")
    add("--model_export", default="hf_format", help=f"whose sizes count, one of: {', '.join(MODEL_EXPORTS)}")
    _add_calibration(flags, num_samples=32, seq_len=256)


def mix_of(options: argparse.Namespace) -> dict[str, Any]:
    """What ``mixing.command.mix`` is called with. Raises ConfigError."""
    _one_of("model_export", [options.model_export], MODEL_EXPORTS)
    known = presets.PRESETS if options.preset_file is None else presets.read_presets(Path(options.preset_file))
    asked = MixConfig(
        schemes=options.schemes,
        max_size=options.max_size,
        max_bits=options.max_bits,
        max_divergence=options.max_divergence,
    )
    return {
        "asked": resolve_schemes(asked, known),
        "calibration": calibration_of(options),
        "export": "quark" if options.model_export == "hf_format" else options.model_export,
    }


def _add_algorithms(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument
    add("--quant_algo", help=f"comma list of: {', '.join(algorithm_names())} (default: weights are rounded)")
    add(
        "--pre_quantization_optimization",
        action="append",
        default=[],
        metavar="ALGO",
        help="the same names; repeat for several. They are applied in the order given, before those of --quant_algo",
    )
    add(
        "--quant_algo_config_file",
        nargs=2,
        action="append",
        default=[],
        metavar=("ALGO", "FILE"),
        help="JSON with the options of one of these algorithms; repeat for several",
    )


def _add_calibration(flags: argparse.ArgumentParser, num_samples: int = 32, seq_len: int = 512) -> None:
    add = flags.add_argument
    add("--num_calib_data", type=_positive, default=num_samples, help=f"calibration samples (default: {num_samples})")
    add("--seq_len", type=_positive, default=seq_len, help=f"tokens per sample (default: {seq_len})")
    add(
        "--dataset",
        default="builtin",
        help="'builtin', a file (.txt .jsonl .json .csv .parquet, or their .gz), or a Hub dataset (pileval, org/name)",
    )
    add("--dataset_config", help="of a Hub dataset (default: the one that there is)")
    add("--dataset_split", help="of a Hub dataset (default: train)")
    add("--dataset_column", help="where the text is, or the chat (default: text, else messages)")
    add("--seed", type=int, default=0, help="picks the calibration windows")
