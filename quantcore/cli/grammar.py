"""The grammar that the commands share: ``COMMAND MODEL [PRESET] [-o OUT]``, in any order among the flags.

The names of AMD Quark's script (``--model_dir``, ``--quant_scheme``, ``--output_dir``) say the same as flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantcore.errors import nearest_names, unknown_value

ELSEWHERE = {
    "--model_dir": ("--model", "--model_path", "--model_name_or_path", "--pyt_ckpt_path"),
    "--adapter": ("--adapter_path", "--adapter_name_or_path", "--lora", "--lora_path", "--peft"),
    "--output_dir": ("--out", "--export_path", "--save_path"),
    "--quant_scheme": ("--scheme", "--preset", "--bits", "--w_bit", "--qformat", "--recipe"),
    "--quant_algo": ("--algo", "--algorithm", "--algorithms", "--method"),
    "--model_export": ("--format", "--formats", "--export_format", "--export_fmt"),
    "--exclude_layers": ("--ignore", "--ignore_layers", "--exclude"),
    "--num_calib_data": ("--nsamples", "--num_samples", "--num_calibration_samples", "--calib_size"),
    "--seq_len": ("--seqlen", "--max_seq_length", "--max_length", "--calib_seq"),
    "--num_eval_data": ("--num_windows", "--num_eval_samples"),
    "--kv_cache_dtype": ("--kv_cache_qformat", "--kv_cache", "--kv_dtype"),
}
"""Flags by the names that other programs, and newcomers, have for them. The error for one of these suggests ours."""


MODEL_FILES = (".gguf", ".onnx", ".safetensors")
"""The endings of files that hold models."""


class Flags(argparse.ArgumentParser):
    """Parser of flags spelled as AMD Quark spells them, with underscores; dashes work as well.

    Arguments without a flag may stand anywhere. ``aliases`` are older names of flags, which work but are not shown. The
    error for an unknown flag suggests the one that was probably meant.
    """

    def __init__(self, *, aliases: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._aliases = aliases or {}
        self._by_place: dict[str, tuple[argparse.Action, Any, bool]] = {}

    def add_place(
        self, place: str, *flags: str, default: Any = None, help: str, required: bool = False, **settings: Any
    ) -> None:
        """Add an argument that is given by its place on the command line or by one of ``flags``.

        Its value has the name of the last flag, and is ``default`` if it is not given.
        """
        self.add_argument(place, nargs="?", default=argparse.SUPPRESS, metavar=place.upper(), help=help, **settings)
        also = f"{place.upper()}, as a flag"
        action = self.add_argument(
            *flags, dest=flags[-1].removeprefix("--"), metavar=place.upper(), help=also, **settings
        )
        self._by_place[place] = action, default, required

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = self._parse(sys.argv[1:] if args is None else args)
        for place, (action, default, required) in self._by_place.items():
            if getattr(options, action.dest, None) is None:
                if required:
                    self.error(f"no {place} is given. It comes first: {self.prog} {place.upper()}")
                setattr(options, action.dest, default)
        return options

    def error(self, message: str) -> Any:
        """Exit with a message of what is wrong, without the list of all flags."""
        kind, _, unknown = message.partition(": ")
        if kind == "unrecognized arguments" and unknown.startswith("--"):
            name = unknown.split()[0].partition("=")[0]
            near = self._meant(_underscored(name))
            message = f"there is no flag {name}." + (f" Did you mean {near}?" if near else "")
        self.exit(2, f"{self.prog}: error: {message}\nUsage: `{self.prog} --help` lists all flags.\n")

    @property
    def names(self) -> set[str]:
        """The names (``dest``) of all arguments."""
        return {action.dest for action in self._actions}

    def given(self, args: Sequence[str]) -> set[str]:
        """Return the names (``dest``) of the arguments that ``args`` contain, whatever their values are."""
        defaults = {action: action.default for action in self._actions}
        for action in self._actions:
            action.default = argparse.SUPPRESS
        try:
            return set(vars(self._parse(args)))
        finally:
            for action, default in defaults.items():
                action.default = default

    def _parse(self, args: Sequence[str]) -> argparse.Namespace:
        """Parse ``args``, and give what was given by its place the name of its flag."""
        options = self.parse_intermixed_args([self._spelled(text) for text in args])
        for place, (action, *_) in self._by_place.items():
            placed, flagged = vars(options).pop(place, None), getattr(options, action.dest, None)
            if placed is None:
                continue
            if flagged is not None and flagged != placed:
                flag = action.option_strings[-1]
                self.error(f"the {place} is given twice: {placed}, and {flag} {flagged}. Leave one of them out.")
            setattr(options, action.dest, placed)
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a word that is not among the choices of a flag, and suggest the nearest one."""
        if action.choices is not None and value not in action.choices:
            error = unknown_value("value", value, action.choices, code="unknown_value")
            raise argparse.ArgumentError(action, f"unknown value '{value}'. {error.hint}")

    def _spelled(self, text: str) -> str:
        if not text.startswith("-"):
            return text
        name, sign, value = text.partition("=")
        name = self._aliases.get(_underscored(name), name)
        return self._names().get(_underscored(name), name) + sign + value

    def _meant(self, name: str) -> str | None:
        """Return the flag that was probably meant: by its name elsewhere, or else the one with the nearest name."""
        names = self._names()
        elsewhere = [ours for ours, others in ELSEWHERE.items() if name in others and ours in names]
        near = elsewhere or nearest_names(name, names, 1)
        return names[near[0]] if near else None

    def _names(self) -> dict[str, str]:
        return {_underscored(name): name for name in self._option_string_actions}


def add_model(flags: Flags, help: str = "folder, GGUF file, or model on the Hub: org/name") -> None:
    """Add the model, ``model_dir``, as the first argument."""
    flags.add_place("model", "--model_dir", required=True, help=help)


def add_output(flags: Flags, default: str, *, has_place: bool = False) -> None:
    """Add the folder for the result, ``output_dir``. ``default`` describes the one of ``default_output``."""
    names = "-o", "--output", "--output_dir"
    help = f"folder to create; nothing is overwritten (default: {default})"
    if has_place:
        flags.add_place("out", *names, type=output_folder, help=help)
    else:
        flags.add_argument(*names, dest="output_dir", metavar="OUT", type=output_folder, help=help)


def output_folder(text: str) -> str:
    """Return the name of a folder for a result. Raises ArgumentTypeError for that of a model file: ``out.gguf``."""
    path = Path(text)
    if path.suffix in MODEL_FILES and not path.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} names a file, and a result is a folder, which has the {path.suffix} file, the report and the"
            f" manifest: give -o {path.with_suffix('')}"
        )
    return text


def default_output(model: str, *more: str) -> str:
    """Return the folder for a result without a name: of ``org/Model-1B`` and ``w4a16``, ``Model-1B-w4a16``."""
    names = [_name_of(Path(model).absolute(), ".gguf"), *(_name_of(Path(text), ".json") for text in more)]
    return "-".join(names)


def _name_of(path: Path, ending: str) -> str:
    return path.stem if path.suffix == ending else path.name


def _underscored(name: str) -> str:
    """Spell ``--quant-scheme`` as ``--quant_scheme``."""
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name


def of_a_model(command: str, description: str, *, has_original: bool = True) -> Flags:
    """Return the flags of a command that measures a model, beside its original if it ``has_original``."""
    usage = f"%(prog)s MODEL {'[--against ORIGINAL] ' if has_original else ''}[flags]"
    flags = Flags(prog=f"bitfoundry {command}", usage=usage, description=description)
    add_model(flags, "folder, GGUF file, model on the Hub, or result: its id, its name or `last`")
    if has_original:
        flags.add_argument("--against", metavar="ORIGINAL", help="original (float) model to compare with")
    flags.add_argument("--json", action="store_true", help="print the result as JSON")
    return flags
