"""The engine's command line.

``python -m quantcore --model_dir ... --output_dir ... --quant_scheme ...`` quantizes, with the flags of the
quantization script of AMD Quark. ``presets`` and ``schema`` print what a scheme can be. Two subcommands serve programs:
``run TASK.json`` (what a worker starts; JSON lines on stdout), ``verify FOLDER EXPECTED`` (the proof's fresh process).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from quantcore import presets
from quantcore.checkpoint.hub import is_model_id, resolve
from quantcore.config import CalibrationConfig, Config, json_schema
from quantcore.errors import ConfigError, QuantError, unknown_value
from quantcore.events import Emit, Failed, print_json_lines
from quantcore.export import EXPORTERS, formats_for
from quantcore.quark_config import read_config
from quantcore.task import EvaluationConfig, Task, read_task

CUSTOM_MODES = ("quark", "fp8")
MODEL_EXPORTS = ("hf_format", *EXPORTERS)
QUANT_ALGOS = ("rtn",)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a known failure (explained), 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _stop)
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "verify": _verify,
        "presets": _presets,
        "schema": _schema,
    }
    try:
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments[1:])
        return _quantize(arguments)
    except KeyboardInterrupt:
        print("Interrupted; nothing was left behind.", file=sys.stderr)
        return 130


def _stop(signum: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that half-written folders are removed."""
    raise KeyboardInterrupt


def _run(arguments: list[str]) -> int:
    """``run TASK.json``: quantize, one JSON line per event on stdout."""
    if len(arguments) != 1:
        print("usage: python -m quantcore run TASK.json", file=sys.stderr)
        return 2
    return _reporting(lambda emit: _pipeline(read_task(Path(arguments[0])), emit), print_json_lines())


def _verify(arguments: list[str]) -> int:
    """``verify FOLDER EXPECTED``: hold the files in FOLDER against what the pipeline noted in EXPECTED."""
    if len(arguments) != 2:
        print("usage: python -m quantcore verify FOLDER EXPECTED", file=sys.stderr)
        return 2

    def verify(emit: Emit) -> None:
        from quantcore.evaluation.proof import proof_line, prove_all
        from quantcore.runtime.devices import limit_threads

        limit_threads()
        folder, scratch = map(Path, arguments)
        for proof in prove_all(read_task(scratch / "task.json"), folder, scratch, emit):
            print(proof_line(proof), flush=True)

    return _reporting(verify, print_json_lines())


def _presets(arguments: list[str]) -> int:
    """``presets [FILE]``: the named schemes, with those of a file, as JSON."""
    found = presets.read_presets(Path(arguments[0])) if arguments else presets.PRESETS
    rows = {
        name: {
            "title": preset.title,
            "aliases": preset.aliases,
            "exports": formats_for(preset.config),
            "config": preset.config.to_dict(),
        }
        for name, preset in found.items()
    }
    print(json.dumps(rows, indent=2))
    return 0


def _schema(arguments: list[str]) -> int:
    """``schema``: the JSON Schema of a config."""
    print(json.dumps(json_schema(), indent=2))
    return 0


def _quantize(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.json:
        return _reporting(lambda emit: _pipeline(_task(options), emit), print_json_lines())
    from quantcore.console import explain, progress_display, show_report

    try:
        with progress_display() as emit:
            report = _pipeline(_task(options), emit)
        show_report(report, options.output_dir)
        return 0
    except QuantError as error:
        explain(error)
        return 1


def _pipeline(task: Task, emit: Emit) -> dict[str, Any]:
    from quantcore.pipeline import run
    from quantcore.runtime.devices import limit_threads

    limit_threads()
    return run(task, emit)


def _reporting(work: Callable[[Emit], object], emit: Emit) -> int:
    """Run ``work``; a QuantError becomes the last event and status 1."""
    try:
        work(emit)
        return 0
    except QuantError as error:
        emit(Failed(error.code, error.message, error.hint, error.retryable))
        return 1


def _task(options: argparse.Namespace) -> Task:
    """The flags as a Task. Raises ConfigError for a value that is not there (yet), with the list of what is."""
    _one_of("quant_algo", options.quant_algo.split(",") if options.quant_algo else [], QUANT_ALGOS)
    _one_of("pre_quantization_optimization", options.pre_quantization_optimization, ())
    _one_of("custom_mode", [options.custom_mode], CUSTOM_MODES)
    _one_of("model_export", options.model_export, MODEL_EXPORTS)
    _one_of("tasks", options.tasks.split(",") if options.tasks else [], ())
    exports = [options.custom_mode if name == "hf_format" else name for name in options.model_export or ["hf_format"]]
    return Task(
        **_model(options),
        output_dir=Path(options.output_dir).absolute(),
        config=_config(options),
        calibration=CalibrationConfig(
            source=options.dataset, num_samples=options.num_calib_data, seq_len=options.seq_len, seed=options.seed
        ),
        export=tuple(dict.fromkeys(exports)),
        evaluation=EvaluationConfig(num_windows=0 if options.skip_evaluation else EvaluationConfig().num_windows),
    )


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


def _config(options: argparse.Namespace) -> Config:
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
    named = {pattern: presets.resolve(scheme, presets=known).global_quant_config
             for pattern, scheme in options.layer_quant_scheme}  # fmt: skip
    config = replace(config, layer_quant_config={**named, **config.layer_quant_config})
    return presets.with_kv_cache(config, options.kv_cache_dtype) if options.kv_cache_dtype else config


def _one_of(flag: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for value in given or ():
        if value not in allowed:
            if not allowed:
                raise ConfigError(
                    f"--{flag} {value} is not available yet: no value is.", code=f"unknown_{flag}", hint="Leave it out."
                )
            raise unknown_value(f"--{flag}", value, allowed, code=f"unknown_{flag}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    scheme_names = ", ".join(presets.PRESETS)
    parser = argparse.ArgumentParser(
        prog="bitfoundry quantize",
        description="Quantize a language model, prove the result, write it. Nothing is overwritten.",
        epilog="Schemes: " + scheme_names + "; the names of AMD Quark (w_fp8_a_fp8, ...) work as well.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model_dir",
        required=True,
        help="folder with config.json, tokenizer and *.safetensors; or a model on the Hugging Face Hub: org/name",
    )
    add("--revision", help="branch, tag or commit of a model on the Hub (default: main)")
    add("--output_dir", required=True, help="folder to create")
    add(
        "--quant_scheme",
        default="fp8",
        help="a preset, or a config .json in the names of docs/config.md (default: fp8)",
    )
    add("--quant_algo", help=f"comma list of: {', '.join(QUANT_ALGOS)} (default)")
    add("--pre_quantization_optimization", action="append", default=[], help="none is available yet")
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
    add("--custom_mode", default="quark", help=f"one of: {', '.join(CUSTOM_MODES)}")
    add("--num_calib_data", type=_positive, default=32, help="calibration samples (default: 32)")
    add("--seq_len", type=_positive, default=512, help="tokens per sample (default: 512)")
    add("--dataset", default="builtin", help="'builtin', a .txt or .jsonl file, or a Hub dataset (pileval)")
    add("--model_export", action="append", help=f"repeat for several: {', '.join(MODEL_EXPORTS)} (default: hf_format)")
    add("--exclude_layers", nargs="*", help="globs of layers to keep (default: lm_head)")
    add("--group_size", type=int, help="for schemes with groups; -1 is the whole row")
    add("--tasks", help="none is available yet; perplexity is always measured unless --skip_evaluation")
    add("--skip_evaluation", action="store_true", help="no perplexity before and after")
    add("--seed", type=int, default=0, help="picks the calibration windows")
    add("--json", action="store_true", help="events as JSON lines on stdout instead of a progress bar")
    return parser
