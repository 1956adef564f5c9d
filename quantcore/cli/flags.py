"""The flags of ``bitfoundry quantize``, those of AMD Quark's quantization script, which other commands share.

``submit``, ``plan`` and ``clone`` take the same ones. ``from_flags`` says what they mean.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from quantcore.config import presets
from quantcore.config.algorithms import algorithm_names
from quantcore.config.job_spec import JobOptions
from quantcore.config.quantization import (
    CalibrationConfig,
)
from quantcore.config.task import EvaluationConfig
from quantcore.export import EXPORTERS
from quantcore.serving.stopwatch import RUNTIMES

CUSTOM_MODES = ("quark", "fp8", "awq")
MODEL_EXPORTS = ("hf_format", *EXPORTERS)
WEIGHT_FORMATS = ("real_quantized", "fake_quantized")
QUANT_ALGOS = (*algorithm_names(), "smooth")  # AMD Quark's config files say smooth, its flags smoothquant
NODES = "nodes"
"""The option that only the service has: on one machine torchrun says how many processes there are."""


class Flags(argparse.ArgumentParser):
    """Flags spelled as AMD Quark spells them, with underscores; dashes are understood as well.

    ``aliases`` are older names of flags, understood and not shown. An unknown flag is answered with the nearest one.
    """

    def __init__(self, *, aliases: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._aliases = aliases or {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(text) for text in given], namespace)

    def error(self, message: str) -> Any:
        """Say what is wrong, without the list of all flags."""
        kind, _, unknown = message.partition(": ")
        if kind == "unrecognized arguments" and unknown.startswith("--"):
            name = unknown.split()[0].partition("=")[0]
            near = difflib.get_close_matches(_underscored(name), self._names(), n=1)
            message = f"there is no flag {name}." + (f" Did you mean {self._names()[near[0]]}?" if near else "")
        self.exit(2, f"{self.prog}: error: {message}\nUsage: `{self.prog} --help` lists all flags.\n")

    def given(self, args: Sequence[str]) -> set[str]:
        """The names (``dest``) of the arguments that ``args`` contain, whatever their values are."""
        defaults = {action: action.default for action in self._actions}
        for action in self._actions:
            action.default = argparse.SUPPRESS
        try:
            return set(vars(self.parse_args(args)))
        finally:
            for action, default in defaults.items():
                action.default = default

    def _spelled(self, text: str) -> str:
        if not text.startswith("-"):
            return text
        name, sign, value = text.partition("=")
        name = self._aliases.get(_underscored(name), name)
        return self._names().get(_underscored(name), name) + sign + value

    def _names(self) -> dict[str, str]:
        return {_underscored(name): name for name in self._option_string_actions}


def _underscored(name: str) -> str:
    """``--quant-scheme`` as ``--quant_scheme``."""
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name


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
    flags = Flags(
        prog="bitfoundry quantize",
        description="Quantize a language model, prove the result, write it. Nothing is overwritten.",
        epilog="Schemes: " + scheme_names + "; the names of AMD Quark (w_fp8_a_fp8, ...) work as well.",
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
    add_job(flags, without=(NODES,))
    add("--json", action="store_true", help="events as JSON lines on stdout instead of a progress bar")
    return flags


def add_job(flags: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Add the flags that say what a job does, but for the options ``without``."""
    add_scheme(flags)
    add_options(flags, without)
    add_evaluation(flags)
    flags.add_argument("--skip_evaluation", action="store_true", help="measure nothing but what the proof needs")


def plain_options() -> list[str]:
    """The fields of JobOptions that are one word or number: each has a flag of its own, which the field describes."""
    return [name for name, field in JobOptions.model_fields.items() if field.description]


def add_options(flags: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Add a flag for each of ``plain_options``. Under ``--help`` it is explained by the field's description."""
    spelled = {"file2file": "file2file_quantization"}  # as in AMD Quark's script
    group = flags.add_argument_group("execution and result")
    for name in plain_options():
        if name in without:
            continue
        field = JobOptions.model_fields[name]
        kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not NoneType]
        is_choice = get_origin(field.annotation) is Literal
        kind = str if is_choice else get_args(kinds[0])[0] if get_origin(kinds[0]) else kinds[0]
        told: dict[str, Any] = {"dest": name, "default": field.default, "help": field.description}
        if field.default not in (None, False):
            told["help"] += " (default: %(default)s)"
        if is_choice:
            told["choices"] = kinds
        elif kind is bool:
            told["action"] = "store_true" if field.default is False else argparse.BooleanOptionalAction
        else:
            told["type"] = kind
        group.add_argument(f"--{spelled.get(name, name)}", **told)


def add_scheme(flags: argparse.ArgumentParser) -> None:
    """What is quantized how, after what text, into which formats."""
    add = flags.add_argument_group("scheme").add_argument
    add(
        "--quant_scheme",
        default="fp8",
        help="a preset, or a config .json in the names of docs/reference/config.md (default: fp8)",
    )
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
    _add_algorithms(flags)
    _add_calibration(flags)
    add = flags.add_argument_group("export").add_argument
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
    add = flags.add_argument_group("evaluation").add_argument
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
    add_budget(flags, required=True)
    add("--output", type=_new_file, metavar="FILE", help="where the config goes, as mix.json; nothing is overwritten")
    add("--preset_file", help="JSON with presets of your own")
    add("--model_export", default="hf_format", help=f"whose sizes count, one of: {', '.join(MODEL_EXPORTS)}")
    _add_calibration(flags)


BUDGETS = ("max_size", "max_bits", "max_divergence")


def add_budget(flags: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the schemes of a mix and the three budgets, of which one is given."""
    group = flags.add_argument_group("mixed precision")
    group.add_argument(
        "--schemes",
        nargs="+",
        required=required,
        help="choose the scheme of each layer among these presets, for one budget; 'keep' leaves a layer as it is",
    )
    budget = group.add_mutually_exclusive_group(required=required)
    budget.add_argument("--max_size", help="target size of all weights, as 90MB")
    budget.add_argument("--max_bits", type=float, help="bits per weight in the mixed layers, scales included: as 4.5")
    budget.add_argument("--max_divergence", type=float, help="largest mean KL from the original, in nats per token")


def _add_algorithms(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument_group("algorithms").add_argument
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


def _add_calibration(flags: argparse.ArgumentParser) -> None:
    usual = CalibrationConfig()
    add = flags.add_argument_group("calibration").add_argument
    shown = "(default: %(default)s)"
    add("--num_calib_data", type=_positive, default=usual.num_samples, help=f"calibration samples {shown}")
    add("--seq_len", type=_positive, default=usual.seq_len, help=f"tokens per sample {shown}")
    add(
        "--dataset",
        default="builtin",
        help="'builtin', a file (.txt .jsonl .json .csv .parquet, or their .gz), or a Hub dataset (pileval, org/name)",
    )
    add("--dataset_config", help="of a Hub dataset (default: the one that there is)")
    add("--dataset_split", help="of a Hub dataset (default: train)")
    add("--dataset_column", help="where the text is, or the chat (default: text, else messages)")
    add("--seed", type=int, default=0, help="picks the calibration windows")
