"""The flags of ``bitfoundry quantize``, which are those of AMD Quark's quantization script.

``submit``, ``plan`` and ``clone`` take the same flags. ``from_flags`` converts them to a task or a request.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from quantcore.cli.grammar import Flags, add_model, add_output
from quantcore.config.algorithms import algorithm_names
from quantcore.config.cache_dtypes import CACHE_DTYPES, PROGRAMS, cache_dtypes
from quantcore.config.job_spec import MAX_ANSWERS, JobOptions
from quantcore.config.presets import PresetChanges
from quantcore.config.quantization import (
    CalibrationConfig,
)
from quantcore.config.recipes import DEFAULT_EFFORT, EFFORTS
from quantcore.config.task import EvaluationConfig
from quantcore.errors import ConfigError
from quantcore.export import EXPORTERS
from quantcore.serving.stopwatch import RUNTIMES

CUSTOM_MODES = ("quark", "fp8", "awq")
MODEL_EXPORTS = ("hf_format", *EXPORTERS)
WEIGHT_FORMATS = ("real_quantized", "fake_quantized")
QUANT_ALGOS = (*algorithm_names(), "smooth")  # AMD Quark's config files say smooth, its flags smoothquant
COMPARED_TOKENS = 1 << 16
"""Number of tokens on which ``compare --against`` measures two results by default."""
NODES = "nodes"
"""The option that only the service has: on one machine torchrun sets the number of processes."""


def new_file(text: str) -> Path:
    """Read a flag that names a file to write; its folder exists, and it does not."""
    path = Path(text)
    if path.exists() or not path.absolute().parent.is_dir():
        fault = "exists already" if path.exists() else "is in a folder that does not exist"
        raise argparse.ArgumentTypeError(f"{text} {fault}")
    return path


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = math.nan
    if not text.endswith("%") or not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage such as 5%")
    return value


def _num_prompts(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of prompts; a model comes before this flag")
    return int(text)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def parser() -> argparse.ArgumentParser:
    flags = Flags(
        prog="bitfoundry quantize",
        usage="%(prog)s MODEL [PRESET] [-o OUT] [flags]",
        description="Quantize a language model locally, verify the result and write it. No file is overwritten. "
        "The flags are those of AMD Quark's script.",
        epilog="`bitfoundry presets` lists the presets; AMD Quark's names (w_fp8_a_fp8, ...) work too.",
    )
    add = flags.add_argument
    add_model(flags)
    add("--revision", help="branch, tag or commit of a model on the Hub (default: main)")
    add(
        "--adapter",
        help="PEFT adapter (LoRA, DoRA) to merge into MODEL first: a folder, or org/name on the Hub. The merged model"
        " is the original of all measurements",
    )
    add("--adapter_revision", help="branch, tag or commit of an adapter on the Hub (default: main)")
    add_output(flags, "MODEL-PRESET, in the current folder")
    add(
        "--resume_dir",
        help="folder for the progress, on the same disk as OUT: if the run stops, the same command continues after its"
        " last saved block. Removed at the end (default: .OUT.resume beside OUT)",
    )
    add_job(flags, without=(NODES,))
    add("--json", action="store_true", help="print events as JSON lines on stdout instead of a progress bar")
    return flags


def add_job(flags: Flags, without: Sequence[str] = ()) -> None:
    """Add the flags that say what a job does, except the options in ``without``."""
    add_scheme(flags)
    add_options(flags, without)
    add_evaluation(flags)
    add_cache_dtypes(flags)
    flags.add_argument("--skip_evaluation", action="store_true", help="measure only what verification needs")


def plain_options() -> list[str]:
    """Return the fields of JobOptions that are one word or number; each has a flag, described by the field."""
    return [name for name, field in JobOptions.model_fields.items() if field.description]


def add_options(flags: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Add a flag for each of ``plain_options``. Its help text is the field's description."""
    spelled = {"file2file": "file2file_quantization"}  # as in AMD Quark's script
    group = flags.add_argument_group("execution and result")
    for name in plain_options():
        if name not in without:
            group.add_argument(f"--{spelled.get(name, name)}", dest=name, **_settings(JobOptions.model_fields[name]))


def _settings(field: FieldInfo) -> dict[str, Any]:
    """Return the settings of the flag for a field that is one word or number, or a list of words."""
    kind = _kind(field.annotation)
    settings: dict[str, Any] = {"default": field.default, "help": field.description}
    if field.default not in (None, False, ()):
        settings["help"] += " (default: %(default)s)"
    if get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    elif get_origin(kind) is tuple:
        settings["nargs"] = "*"
    elif kind is bool:
        settings["action"] = "store_true" if field.default is False else argparse.BooleanOptionalAction
    else:
        settings["type"] = kind
    return settings


def _kind(annotation: Any) -> Any:
    """Return the type of a field's values, without None and without the rules of ``Annotated``."""
    while get_origin(annotation) in (Union, UnionType, Annotated):
        annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
    return annotation


def add_scheme(flags: Flags) -> None:
    """Add the preset, and the flags for schemes, algorithms, calibration text and export formats."""
    flags.add_place(
        "preset",
        "--quant_scheme",
        default="fp8",
        help="preset, or config file (.json, see docs/reference/config.md) (default: fp8); `quantize` takes several,"
        " Q4_K_M,Q8_0, each with a folder of its own in OUT",
    )
    add = flags.add_argument_group("scheme").add_argument
    for name, flag in PresetChanges.flags().items():
        add(flag, **_settings(PresetChanges.model_fields[name]))
    add(
        "--layer_quant_scheme",
        nargs=2,
        action="append",
        default=[],
        metavar=("PATTERN", "SCHEME"),
        help="preset for the layers that match a glob; repeatable, the first match applies",
    )
    add("--preset_file", help="JSON file with your own presets")
    add(
        "--strict",
        action="store_true",
        help="fail, instead of a warning, for a pattern that matches no layer, and for layers that vLLM fuses with"
        " different schemes",
    )
    _add_algorithms(flags)
    add_calibration(flags)
    add = flags.add_argument_group("export").add_argument
    add("--custom_mode", help=f"layout of hf_format: {', '.join(CUSTOM_MODES)} (default: quark)")
    add(
        "--model_export",
        type=_comma_separated,
        action="extend",
        help=f"output formats: {', '.join(MODEL_EXPORTS)}; several as awq,gguf or with the flag repeated (default: the"
        " one that most programs load directly for the scheme)",
    )
    add(
        "--export_weight_format",
        default="real_quantized",
        help=f"weights of hf_format: {', '.join(WEIGHT_FORMATS)} (default: real_quantized)",
    )


def add_hardware(flags: argparse.ArgumentParser) -> None:
    """Add the flags that describe the hardware a job is planned for."""
    add = flags.add_argument
    add("--devices", default="", help="devices of each node, e.g. 8x80GB for eight of 80 GB (default: none, the CPU)")
    add("--nodes", type=int, default=1, help="number of identical nodes (default: 1)")
    add("--host_memory", default="", help="memory of each node, e.g. 1TB (default: not checked)")
    add("--disk", default="", help="free disk space for model and output, e.g. 4TB (default: not checked)")


def _comma_separated(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"'{text[:80]}' is not a JSON object such as '{{\"enable_thinking\": false}}'")
    return value


TEMPLATE_ARGUMENTS: dict[str, Any] = {
    "type": _json_object,
    "metavar": "JSON",
    "help": "arguments of the model's chat template, for its chats, such as '{\"enable_thinking\": false}'",
}


def add_evaluation(flags: argparse.ArgumentParser) -> None:
    """Add the flags that ``evaluation_of`` reads."""
    usual = EvaluationConfig()
    add = flags.add_argument_group("evaluation").add_argument
    add(
        "--tasks",
        help="comma-separated tasks of lm-evaluation-harness (bitfoundry[eval]), run in addition to perplexity",
    )
    add("--eval_batch_size", type=positive, default=usual.batch_size, help="batch size of these tasks (default: 8)")
    add(
        "--behaviour",
        type=_num_prompts,
        nargs="?",
        const=MAX_ANSWERS,
        metavar="N",
        help=f"both models answer the first N prompts (default: {MAX_ANSWERS}), greedily and as their settings"
        " sample: finds loops, answers without an end, broken JSON and tool calls; generating takes minutes or more",
    )
    add(
        "--behaviour_len",
        type=positive,
        help=f"most tokens of these answers; models that think need thousands (default: {usual.behaviour_len})",
    )
    add(
        "--prompts",
        metavar="FILE",
        help="your own prompts (.jsonl) in place of the packaged ones, for own answers and --behaviour",
    )
    add("--limit", type=positive, help="maximum documents per task (default: all)")
    add("--num_fewshot", type=int, help="few-shot examples per question (default: the task's own)")
    add("--include_path", help="folder with YAML files of additional tasks")
    _add_text(add, f"default: {usual.num_windows}", usual.num_windows)


def add_cache_dtypes(flags: argparse.ArgumentParser) -> None:
    """Add the flag of ``kv_cache_dtypes``, which takes names that are known."""
    flags.add_argument(
        "--kv_cache_dtypes",
        type=_cache_dtypes,
        metavar="NAMES",
        help="measure the model with a KV cache of each of these dtypes, beside one of 16 bits, as llama.cpp and vLLM"
        f" would keep it: {', '.join(CACHE_DTYPES)}; {' and '.join(PROGRAMS)} name all of a program",
    )


def _cache_dtypes(text: str) -> list[str]:
    names = _comma_separated(text)
    try:
        cache_dtypes(names)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _add_text(add: Callable[..., object], default: str, num_windows: int | None = None) -> None:
    """Add the flags for the evaluation's text."""
    add(
        "--eval_dataset",
        help="evaluation text: a file or a Hub dataset (default: held-out part of the calibration data)",
    )
    add("--eval_dataset_config", help="configuration of a Hub dataset (default: its only one)")
    add("--eval_dataset_split", help="split of a Hub dataset (default: train)")
    add("--eval_dataset_column", help="column with the text or the chat messages (default: text, else messages)")
    add("--eval_chat_template_kwargs", **TEMPLATE_ARGUMENTS)
    add("--eval_stride", type=positive, help="stride between evaluation windows, in tokens (default: no overlap)")
    add("--num_eval_data", type=positive, default=num_windows, help=f"number of evaluation windows ({default})")
    usual_len = _length(EvaluationConfig().seq_len)
    add("--eval_seq_len", type=positive, help=f"tokens per evaluation window (default: {usual_len})")


def comparing() -> Flags:
    """Return the flags of ``bitfoundry compare``."""
    flags = Flags(
        prog="bitfoundry compare",
        description="Compare several results for one model by size and quality, from their reports. With --against,"
        " measure whether the first of two results is worse than the second one: exit status 3 if it is. Either may be"
        " several results of one recipe with other seeds, as OUT1,OUT2,OUT3: then the recipes are compared.",
    )
    add = flags.add_argument
    add("folders", nargs="+", help="results: folders, ids, names or `last`; with --against the models NEW and OLD")
    add("--json", action="store_true", help="print the result as JSON")
    add = flags.add_argument_group("NEW and OLD, measured").add_argument
    add("--against", metavar="ORIGINAL", help="original (float) model to measure the divergence from")
    add(
        "--tolerance",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="rise of the KL divergence that is not called worse, e.g. 5%% (default: 0%%)",
    )
    _add_text(add, f"default: as many as {COMPARED_TOKENS >> 10}k tokens need, or as the text has")
    return flags


def add_speed(flags: argparse.ArgumentParser) -> None:
    """Add the flags for the serving program and its workload."""
    add = flags.add_argument
    add("--runtime", choices=RUNTIMES, help="serving program (default: llama_cpp for GGUF files, else transformers)")
    add(
        "--python",
        default=sys.executable,
        help="Python interpreter of the environment with that program (default: this one)",
    )
    add("--prompt_len", type=positive, default=256, help="tokens per prompt (default: 256)")
    add("--num_new", type=positive, default=64, help="tokens to generate per prompt, at least 2 (default: 64)")
    add("--batch_size", type=positive, default=1, help="prompts per batch (default: 1)")
    add("--repeats", type=positive, default=3, help="number of runs; the median is reported (default: 3)")


def add_mix(flags: argparse.ArgumentParser) -> None:
    """Add the flags that ``mix_of`` reads."""
    add = flags.add_argument
    add_budget(flags, required=True)
    add("-o", "--output", type=new_file, metavar="FILE", help="config file to write, e.g. mix.json; it must not exist")
    add("--preset_file", help="JSON file with your own presets")
    add(
        "--model_export",
        help=f"format whose sizes count: {', '.join(MODEL_EXPORTS)} (default: the one that most programs load directly"
        " for these schemes)",
    )
    add_calibration(flags)


def _length(seq_len: int) -> str:
    return f"{seq_len}, or as many as the model reads"


BUDGETS = ("max_size", "max_bits", "max_divergence")


def add_budget(flags: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the flags for the schemes of a mix and its three budgets, which exclude each other."""
    group = flags.add_argument_group("mixed precision")
    group.add_argument(
        "--schemes",
        nargs="+",
        required=required,
        help="presets to choose from for each layer, within one budget; 'keep' leaves a layer unquantized",
    )
    budget = group.add_mutually_exclusive_group(required=required)
    budget.add_argument("--max_size", help="target size of all weights, e.g. 90MB")
    budget.add_argument(
        "--max_bits", type=float, help="target bits per weight in the mixed layers, including scales, e.g. 4.5"
    )
    budget.add_argument(
        "--max_divergence", type=float, help="maximum mean KL divergence from the original, in nats per token"
    )


def _add_algorithms(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument_group("algorithms").add_argument
    add(
        "--effort",
        choices=EFFORTS,
        help="use the algorithms that are recommended for the scheme: fast rounds to nearest and needs no data, best"
        f" takes every one that improves quality (default: {DEFAULT_EFFORT} for a preset, unless algorithms are named;"
        " none for AMD Quark's names and for config files)",
    )
    add(
        "--quant_algo",
        help=f"comma-separated algorithms: {', '.join(algorithm_names())}; or none, to round to nearest (default: as"
        " --effort says)",
    )
    add(
        "--pre_quantization_optimization",
        action="append",
        default=[],
        metavar="ALGO",
        help="algorithm to apply before those of --quant_algo; repeatable, applied in this order",
    )
    add_imatrix(add)
    add(
        "--quant_algo_config_file",
        nargs=2,
        action="append",
        default=[],
        metavar=("ALGO", "FILE"),
        help="JSON file with the options of an algorithm; repeatable",
    )


def add_imatrix(add: Callable[..., Any]) -> None:
    add(
        "--imatrix",
        metavar="FILE",
        help="importance matrix of llama.cpp (llama-imatrix, .gguf or .dat; `bitfoundry imatrix` makes one): the mean"
        " squares of the inputs in place of calibration, by which rtn chooses ranges. It has too little for gptq and"
        " the other algorithms",
    )


def add_calibration(flags: argparse.ArgumentParser) -> None:
    usual = CalibrationConfig()
    add = flags.add_argument_group("calibration").add_argument
    shown = "(default: %(default)s)"
    add("--num_calib_data", type=positive, default=usual.num_samples, help=f"calibration samples {shown}")
    add("--seq_len", type=positive, help=f"tokens per sample (default: {_length(usual.seq_len)})")
    add(
        "--dataset",
        default="builtin",
        help="'builtin', a file (.txt .jsonl .json .csv .parquet, or their .gz), or a Hub dataset (pileval, org/name);"
        " several with shares: chats.jsonl:0.75,org/code:column=content:0.25",
    )
    add("--dataset_config", help="configuration of a Hub dataset (default: its only one)")
    add("--dataset_split", help="split of a Hub dataset (default: train)")
    add("--dataset_column", help="column with the text or the chat messages (default: text, else messages)")
    add("--chat_template_kwargs", **TEMPLATE_ARGUMENTS)
    add("--seed", type=int, default=0, help="random seed that selects the calibration samples (default: 0)")
