"""``bitfoundry convert MODEL -o OUT --to FORMAT``: writes another format with the same codes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import check_free
from quantcore.cli.grammar import Flags, add_model, add_output, default_output
from quantcore.cli.inputs import check_models
from quantcore.cli.running import reporting, shown
from quantcore.events import Emit, print_json_lines
from quantcore.export import EXPORTERS


def parser() -> Flags:
    formats = ", ".join(EXPORTERS)
    flags = Flags(
        prog="bitfoundry convert",
        usage="%(prog)s MODEL [-o OUT] --to FORMAT [flags]",
        description="Convert a quantized model to another format. Lossless; refuses and explains when it cannot be.",
    )
    add_model(flags, "folder or GGUF file of a quantized model, from Bitfoundry or another tool")
    add_output(flags, "MODEL-FORMAT, in the current folder", has_place=True)
    flags.add_argument("--to", required=True, metavar="FORMAT", help=f"output format: {formats}")
    flags.add_argument(
        "--nvfp4",
        action="store_true",
        help="write MXFP4 weights as NVFP4, with the same values; refused if the scales of a layer differ too much",
    )
    flags.add_argument(
        "--json", action="store_true", help="print events as JSON lines on stdout instead of a progress bar"
    )
    return flags


def run(options: argparse.Namespace) -> int:
    """Convert the model that the flags name, and return the exit status."""
    output_dir = Path(options.output_dir or default_output(options.model_dir, options.to))

    def work(emit: Emit) -> dict[str, Any]:
        check_models(options.model_dir)
        check_free(output_dir)
        from quantcore.engine.commands.convert import convert

        return convert(Path(options.model_dir), output_dir, options.to, emit, with_nvfp4=options.nvfp4)

    if options.json:
        return reporting(work, print_json_lines())
    return shown(work, lambda done: print(f"Converted {done['num_layers']} layers to {done['to']}: {output_dir}"))
