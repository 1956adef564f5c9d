"""The engine's command line.

``python -m quantcore quantize MODEL [PRESET] [-o OUT]`` quantizes, and so does ``python -m quantcore --model_dir ...
--output_dir ... --quant_scheme ...``, with the flags of the quantization script of AMD Quark. ``auto`` chooses the
scheme for a goal, ``mix`` that of each layer for a size or a quality. ``convert`` writes a quantized model in another
format, ``imatrix`` an importance matrix for llama.cpp, ``conversations`` texts that a chat model writes, to calibrate
it on. ``evaluate`` measures a model, ``reference`` writes what it predicts, to measure others by, ``speed`` times a
program that serves it, ``compare`` shows several results, or measures whether one is worse than another, ``chat`` shows
the answers of a model beside its original's. ``plan`` shows the resources that a job would need. ``presets`` and
``schema`` print the possible schemes, ``pull`` fetches a model from the Hub. ``selftest`` compares a device with a CPU.
Five subcommands are for programs: ``run TASK.json`` (started by a worker; JSON lines on stdout), ``verify FOLDER
EXPECTED`` (the proof's fresh process), ``examine FILE`` (the content of an uploaded data file), ``publish`` (uploads an
artifact; the task is on standard input), ``converse TASK.json`` (a chat with prompts on standard input).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

from quantcore.cli import several_presets
from quantcore.cli.flags import add_mix, add_speed, comparing, parser
from quantcore.cli.from_flags import compared_text_of, mix_of, task_of
from quantcore.cli.grammar import Flags, add_model, default_output, of_a_model
from quantcore.cli.inputs import Find, check_models, check_text, find_run, found, path_of
from quantcore.cli.running import (
    INTERRUPTED,
    Asked,
    pipeline,
    print_json,
    proof_standing_by,
    rank,
    reporting,
    run_here,
    shown,
    verify,
)
from quantcore.config import presets
from quantcore.config.quantization import json_schema
from quantcore.config.task import read_task
from quantcore.data.documents import find_file
from quantcore.errors import QuantError
from quantcore.events import Completed, Emit, Failed, PhaseStarted, print_json_lines
from quantcore.export import formats_for
from quantcore.report.quality import PairedQuality
from quantcore.sandbox.environment import OWN_SETTINGS
from quantcore.sandbox.parent_death import end_with_parent

T = TypeVar("T")


def main(argv: Sequence[str] | None = None, find: Find = find_run) -> int:
    """Run a command and return its exit status. ``find`` finds a result by its name.

    0: done, 1: a known failure (explained) or a failed task of an evaluation, 2: wrong usage, 3: a result is worse than
    the one that it was compared with, 130: interrupted.
    """
    for variable, value in OWN_SETTINGS.items():
        os.environ.setdefault(variable, value)
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _stop)
    commands: dict[str, Callable[[list[str]], int]] = {
        "quantize": _quantize,
        "run": _run,
        "verify": verify,
        "examine": _examine,
        "publish": _publish,
        "fetch": _fetch,
        "converse": _converse,
        "convert": partial(_in_module, "convert_command"),
        "imatrix": partial(_in_module, "imatrix_command"),
        "conversations": partial(_in_module, "conversations_command"),
        "evaluate": partial(_evaluate, find=find),
        "reference": partial(_reference, find=find),
        "compare": partial(_compare, find=find),
        "chat": partial(_chat, find=find),
        "speed": partial(_speed, find=find),
        "auto": _auto,
        "mix": _mix,
        "plan": _plan,
        "pull": _pull,
        "presets": _presets,
        "schema": _schema,
        "selftest": _selftest,
    }
    try:
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments[1:])
        return _quantize(arguments)
    except QuantError as error:  # of a name: work explains its own
        from quantcore.cli.console import explain

        explain(error)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. No partial output was left.", file=sys.stderr)
        return INTERRUPTED


def _stop(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on SIGTERM, as Ctrl-C does, so that half-written folders are removed."""
    raise KeyboardInterrupt


def _run(arguments: list[str]) -> int:
    """Run ``run TASK.json``: quantize, and print one JSON line per event on stdout."""
    if len(arguments) != 1:
        print("usage: python -m quantcore run TASK.json", file=sys.stderr)
        return 2
    if rank() is not None:
        end_with_parent()  # joining the other ranks does so too, but seconds later

    # A failed task of the evaluation is in the report, and the job has its result: that is no failure here.
    def work(emit: Emit) -> None:
        task = read_task(Path(arguments[0]))
        with proof_standing_by():
            pipeline(task, emit)

    return reporting(work, print_json_lines())


def _examine(arguments: list[str]) -> int:
    from quantcore.engine.data import examine

    return examine.main(arguments)


def _in_module(name: str, arguments: list[str]) -> int:
    """Run the command that a module of this package reads and runs."""
    command = import_module(f"quantcore.cli.{name}")
    return int(command.run(command.parser().parse_args(arguments)))


def _evaluate(arguments: list[str], find: Find) -> int:
    from quantcore.cli import evaluate_command

    return evaluate_command.evaluate(arguments, find)


def _reference(arguments: list[str], find: Find) -> int:
    from quantcore.cli import evaluate_command

    return evaluate_command.reference(arguments, find)


def _speed(arguments: list[str], find: Find) -> int:
    """Run ``speed MODEL [--against ORIGINAL]``: time a program that serves the model."""
    flags = of_a_model("speed", "Benchmark a model in a serving program: tokens per second and memory.")
    add_speed(flags)
    options = found(flags.parse_args(arguments), find)

    def work(emit: Emit) -> dict[str, Any]:
        check_models(options.model_dir, options.against)
        from quantcore.engine.commands.speed import Load, speed

        load = Load(options.prompt_len, options.num_new, options.batch_size, options.repeats)
        return speed(options.model_dir, options.against, load, emit, runtime=options.runtime, python=options.python)

    from quantcore.cli.console import show_speed

    return shown(work, print_json if options.json else show_speed)


def _compare(arguments: list[str], find: Find) -> int:
    """Run ``compare FOLDER ...``: compare results for one model by size and quality, or measure a pair of them."""
    from quantcore.cli.console import explain, show_comparison
    from quantcore.report.compare import compare

    flags = comparing()
    options = flags.parse_args(arguments)
    options.folders = [",".join(path_of(name, find) for name in side.split(",")) for side in options.folders]
    if options.against is not None:
        if len(options.folders) != 2:
            flags.error(f"--against measures NEW and OLD, and {len(options.folders)} are given (several: A,B,C)")
        return _measure_change(options)
    if of_measuring := sorted(flags.given(arguments) - {"folders", "json"}):
        flags.error(f"--{of_measuring[0]} needs --against ORIGINAL")
    try:
        comparison = compare(options.folders)
    except QuantError as error:
        explain(error)
        return 1
    (print_json if options.json else show_comparison)(comparison)
    return 0


def _measure_change(options: argparse.Namespace) -> int:
    def work(emit: Emit) -> PairedQuality:
        (new, old), text = (side.split(",") for side in options.folders), compared_text_of(options)
        check_models(*new, *old, options.against)
        check_text(text)
        from quantcore.engine.commands.compare import measure_change
        from quantcore.engine.runtime.devices import limit_threads

        limit_threads()
        return measure_change(new, old, options.against, text, emit, tolerance=options.tolerance)

    from quantcore.cli.console import show_change

    return shown(work, print_json if options.json else show_change)


def _chat(arguments: list[str], find: Find) -> int:
    """Run ``chat OUT --against ORIGINAL``: let both models answer prompts, side by side."""
    from quantcore.cli import chat

    return chat.run(found(chat.parser().parse_args(arguments), find))


def _mix(arguments: list[str]) -> int:
    """Run ``mix MODEL --schemes A B --max_size 90MB``: write a config with the scheme that suits each layer."""
    flags = Flags(
        prog="bitfoundry mix",
        usage="%(prog)s MODEL [-o FILE] --schemes PRESET ... [flags]",
        description="Choose the scheme of each layer for a target size or quality, and write the config.",
        epilog="Quantize with the config: bitfoundry quantize MODEL mix.json",
    )
    add_model(flags)
    add_mix(flags)
    flags.add_argument("--json", action="store_true", help="print the result as JSON")
    options = flags.parse_args(arguments)

    def work(emit: Emit) -> dict[str, Any]:
        asked = mix_of(options)
        check_models(options.model_dir)
        for part in asked["calibration"].parts:
            find_file(part)
        from quantcore.engine.mixed_precision.command import mix
        from quantcore.engine.runtime.devices import limit_threads

        limit_threads()
        result = mix(options.model_dir, emit=emit, **asked)
        if options.output is not None:
            options.output.write_text(json.dumps(result["config"], indent=2) + "\n", "utf-8")
        return result

    from quantcore.cli.console import show_mix

    return shown(work, print_json if options.json else show_mix)


def _plan(arguments: list[str]) -> int:
    """Run ``plan MODEL --devices 8x80GB ...``: show executor, memory, disk and time. Status 1 if it does not fit."""
    from quantcore.cli import plan_command as planning

    options = planning.parser().parse_args(arguments)
    try:
        capacity = planning.answer(options)
    except QuantError as error:
        if options.json:
            print_json_lines()(Failed(error.code, error.message, error.hint, error.retryable))
        else:
            from quantcore.cli.console import explain

            explain(error)
        return 1
    (planning.show_json if options.json else planning.show)(capacity)
    return 0 if capacity.fits else 1


def _publish(arguments: list[str]) -> int:
    """Run ``publish``: read the Hub token (or an empty line) and then the task from standard input."""
    if arguments:
        print("usage: python -m quantcore publish < TOKEN-AND-TASK", file=sys.stderr)
        return 2

    def publish(emit: Emit) -> None:
        from quantcore.hub.push_task import read_publish_task

        token = sys.stdin.readline().strip()
        task = read_publish_task(sys.stdin.read())
        if task.target.to is not None:
            from quantcore.hub.storage import store

            emit(store(task, emit))
        else:
            from quantcore.hub.push import push

            emit(push(task, token, emit))

    return reporting(publish, print_json_lines())


def _fetch(arguments: list[str]) -> int:
    """Run ``fetch URL SHA FOLDER``: copy a model from an object store, and print one JSON line per event on stdout."""
    if len(arguments) != 3:
        print("usage: python -m quantcore fetch URL SHA FOLDER", file=sys.stderr)
        return 2

    def fetch(emit: Emit) -> None:
        from quantcore.hub.download import download

        emit(PhaseStarted("download"))
        download(arguments[0], arguments[1], emit, folder=Path(arguments[2]))

    return reporting(fetch, print_json_lines())


def _converse(arguments: list[str]) -> int:
    """Run ``converse TASK.json``: answer prompts from standard input, and print one JSON line per event on stdout."""
    if len(arguments) != 1:
        print("usage: python -m quantcore converse TASK.json < PROMPTS", file=sys.stderr)
        return 2

    def work(emit: Emit) -> None:
        from quantcore.engine.chat.converse import converse, read_chat_task
        from quantcore.engine.runtime.devices import limit_threads

        limit_threads()
        converse(read_chat_task(Path(arguments[0])), sys.stdin, emit)

    return reporting(work, print_json_lines())


def _pull(arguments: list[str]) -> int:
    """Run ``pull MODEL_ID --output_dir DIR``: download a model from the Hub and check each file."""
    flags = Flags(
        prog="bitfoundry pull",
        usage="%(prog)s MODEL -o OUT [flags]",
        description="Download a model from the Hugging Face Hub and verify the hash of each file. A private or gated "
        "model needs your own token: HF_TOKEN, or `hf auth login`.",
    )
    flags.add_argument("model_id", help="org/name")
    flags.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    flags.add_argument(
        "-o",
        "--output",
        "--output_dir",
        dest="output_dir",
        required=True,
        type=Path,
        metavar="OUT",
        help="folder to create, or to resume in",
    )
    flags.add_argument(
        "--json", action="store_true", help="print events as JSON lines on stdout instead of a progress bar"
    )
    options = flags.parse_args(arguments)

    def work(emit: Emit) -> dict[str, Any]:
        from quantcore.hub.pull import pull

        return pull(options.model_id, options.revision, options.output_dir, emit)

    if options.json:
        return reporting(lambda emit: emit(Completed(work(emit))), print_json_lines())
    return shown(
        work,
        lambda done: print(f"Downloaded and verified: {done['num_files']} files of {done['sha']} in {done['folder']}"),
    )


def _presets(arguments: list[str]) -> int:
    """Run ``presets [FILE]``: print the named schemes, with those of a file, as JSON."""
    named = presets.read_presets(Path(arguments[0])) if arguments else presets.PRESETS
    rows = {
        name: {
            "title": preset.title,
            "aliases": preset.aliases,
            "exports": formats_for(preset.config),
            "config": preset.config.to_dict(),
        }
        for name, preset in named.items()
    }
    print_json(rows)
    return 0


def _schema(arguments: list[str]) -> int:
    """Run ``schema``: print the JSON Schema of a config."""
    print_json(json_schema())
    return 0


def _selftest(arguments: list[str]) -> int:
    """Run ``selftest``: compute the engine's parts on a device and on the CPU. Status 1 if they differ."""
    from quantcore.cli import selftest_command as testing

    options = testing.parser().parse_args(arguments)
    return shown(lambda emit: testing.answer(options, emit), testing.show_json if options.json else testing.show)


def _auto(arguments: list[str]) -> int:
    """Run ``auto MODEL --runtime R --device D``: quantize for a goal."""
    return run_here(asked_of("auto", arguments))


def _quantize(arguments: list[str]) -> int:
    """Run ``quantize MODEL PRESET``: quantize with one preset, or with each of several, ``Q4_K_M,Q8_0``."""
    options = parser().parse_args(arguments)
    if len(several_presets.names_of(options.quant_scheme)) > 1:
        return several_presets.run(options, arguments)
    return run_here(asked_of("quantize", arguments))


def asked_of(name: Literal["quantize", "auto"], arguments: Sequence[str]) -> Asked:
    """Return what the ``arguments`` of a command ask for."""
    command = ("bitfoundry", name, *arguments)
    if name == "auto":
        from quantcore.cli import auto

        options = auto.parser().parse_args(arguments)
        options.output_dir = options.output_dir or default_output(options.model_dir, options.runtime, options.device)
        return Asked(options, auto.task_of, command, f"auto for {options.runtime} on {options.device}")
    options = parser().parse_args(arguments)
    options.output_dir = options.output_dir or default_output(options.model_dir, options.quant_scheme)
    return Asked(options, task_of, command, options.quant_scheme)
