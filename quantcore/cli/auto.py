"""``bitfoundry auto MODEL --runtime vllm --device 24GB``: the best result for a place, a size and a quality."""

from __future__ import annotations

import argparse
from pathlib import Path

from quantcore.cli.flags import add_calibration, add_evaluation, add_imatrix, add_options, plain_options
from quantcore.cli.from_flags import calibration_of, evaluation_of, model_of, with_imatrix
from quantcore.cli.goal_flags import add_goal, goal_of
from quantcore.cli.grammar import Flags, add_model, add_output
from quantcore.config.job_spec import NO_SCHEME
from quantcore.config.quantization import Config
from quantcore.config.task import Task


def parser() -> Flags:
    flags = Flags(
        prog="bitfoundry auto",
        usage="%(prog)s MODEL [-o OUT] --runtime RUNTIME --device DEVICE [flags]",
        description="Quantize a model for a goal: say where it will run, how large it may be and how good it must be. "
        "Candidates are quantized and measured until the smallest one that is good enough is found.",
        epilog="The same command continues a search that was stopped.",
    )
    add_model(flags)
    flags.add_argument("--revision", help="branch, tag or commit of a model on the Hub (default: main)")
    add_output(flags, "MODEL-RUNTIME-DEVICE, in the current folder")
    add_goal(flags, is_alone=True)
    add_calibration(flags)
    add_imatrix(flags.add_argument)
    add_evaluation(flags)
    add_options(flags, without=[name for name in plain_options() if name != "gate"])
    flags.add_argument(
        "--json", action="store_true", help="print events as JSON lines on stdout instead of a progress bar"
    )
    return flags


def task_of(options: argparse.Namespace) -> Task:
    """Return the Task of the flags of ``auto``."""
    chain = () if options.imatrix is None else tuple(with_imatrix([], options.imatrix))
    return Task(
        **model_of(options),
        output_dir=Path(options.output_dir).absolute(),
        config=Config(global_quant_config=NO_SCHEME, algo_config=chain),
        goal=goal_of(options),
        calibration=calibration_of(options),
        evaluation=evaluation_of(options),
        gate=options.gate,
    )
