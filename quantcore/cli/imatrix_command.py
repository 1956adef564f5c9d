"""``bitfoundry imatrix MODEL -o FILE``: writes an importance matrix for llama.cpp's tools."""

from __future__ import annotations

import argparse
from typing import Any

from quantcore.cli.flags import add_calibration, new_file
from quantcore.cli.from_flags import calibration_of
from quantcore.cli.grammar import Flags, add_model
from quantcore.cli.inputs import check_models
from quantcore.cli.running import print_json, shown
from quantcore.data.documents import find_file
from quantcore.events import Emit


def parser() -> Flags:
    flags = Flags(
        prog="bitfoundry imatrix",
        usage="%(prog)s MODEL -o FILE [flags]",
        description="Write an importance matrix, the mean squares of the inputs of all layers on a text: for"
        " llama-quantize --imatrix, and for bitfoundry quantize --imatrix.",
    )
    add_model(flags)
    where = "file to write, such as model.imatrix.gguf; it must not exist"
    flags.add_argument("-o", "--output", type=new_file, required=True, metavar="FILE", help=where)
    add_calibration(flags)
    flags.add_argument("--json", action="store_true", help="print the result as JSON")
    return flags


def run(options: argparse.Namespace) -> int:
    """Write the file that the flags ask for, and return the exit status."""

    def work(emit: Emit) -> dict[str, Any]:
        calibration = calibration_of(options)
        check_models(options.model_dir)
        for part in calibration.parts:
            find_file(part)
        from quantcore.engine.commands.imatrix import imatrix
        from quantcore.engine.runtime.devices import limit_threads

        limit_threads()
        return imatrix(options.model_dir, options.output, calibration, emit)

    def show(done: dict[str, Any]) -> None:
        print(f"Wrote the inputs of {done['num_tensors']} tensors on {done['num_tokens']} tokens: {done['file']}")

    return shown(work, print_json if options.json else show)
