"""``bitfoundry chat OUT --against ORIGINAL``: the answers of a quantized model and its original, side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from quantcore.cli.chat_view import show_lines, show_streamed
from quantcore.cli.console import explain
from quantcore.cli.explain import explained
from quantcore.cli.flags import positive
from quantcore.cli.grammar import Flags, add_model
from quantcore.cli.inputs import check_models, find_merged
from quantcore.cli.running import shown
from quantcore.errors import ConfigError, ModelError, QuantError
from quantcore.events import Emit, silence
from quantcore.report.answers import MAX_NEW_TOKENS
from quantcore.report.compare import read_report
from quantcore.report.values import SourceModel

if TYPE_CHECKING:
    from quantcore.engine.chat.chat import Chat


def parser() -> Flags:
    flags = Flags(
        prog="bitfoundry chat",
        usage="%(prog)s MODEL [--against ORIGINAL] [flags]",
        description="Chat with a quantized model and its original: both answers side by side, and where they part. "
        "Decoding is greedy. Both models are held in memory at once, dequantized, in the dtype of their floats.",
        epilog="In a terminal, /reset starts a new conversation and /exit ends it. Without a terminal, each line of "
        "standard input is a prompt by itself.",
    )
    add_model(flags, "result: its folder, GGUF file, id, name or `last`")
    flags.add_argument(
        "--against",
        metavar="ORIGINAL",
        help="original model: folder, GGUF file, or model on the Hub (default: the one that MODEL's report.json names)",
    )
    flags.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEXT",
        help="prompts to answer, each by itself, instead of a chat",
    )
    flags.add_argument(
        "--max_new_tokens",
        type=positive,
        default=MAX_NEW_TOKENS,
        help="tokens after which an answer is cut off (default: %(default)s)",
    )
    flags.add_argument("--json", action="store_true", help="print a JSON object per prompt")
    return flags


def run(options: argparse.Namespace) -> int:
    """Load both models, then answer the prompts of the options, of standard input or of a person."""
    with ExitStack() as stack:

        def load(emit: Emit) -> Chat:
            folder = find_artifact(Path(options.model_dir))
            against = options.against or original_of(folder)
            check_models(against)
            from quantcore.engine.chat.chat import open_chat
            from quantcore.engine.evaluation.inputs import find_model
            from quantcore.engine.runtime.devices import limit_threads

            limit_threads()
            original = find_model(against, emit)
            merged = None if options.against else source_of(folder).adapter
            adapter = None if merged is None else find_merged(merged, emit)
            return stack.enter_context(open_chat(folder, original, options.max_new_tokens, adapter))

        return shown(load, lambda chat: _talk(chat, options))


def find_artifact(out: Path) -> Path:
    """Return ``out`` if it holds one model. Raises ModelError for a folder with several, or none."""
    if not out.exists():
        raise ModelError(
            f"There is no result '{out}'.",
            code="model_not_found",
            hint="Give the folder of a result, or an id or name that `bitfoundry list` shows.",
        )
    with suppress(ConfigError):
        exports = read_report(out).summary.exports
        if len(exports) > 1:
            raise ModelError(
                f"{out} holds {len(exports)} models: {', '.join(exports)}.",
                code="several_models",
                hint=f"Give one of their folders, such as {out / next(iter(exports.values())).path}.",
            )
    return out


def original_of(out: Path) -> str:
    """Return the folder, or the id on the Hub, of the model that ``out`` was made from. Raises as ``source_of``."""
    source = source_of(out)
    if source.path is not None and Path(source.path).exists():
        return source.path
    if source.path is None and source.id is not None:
        return source.id
    raise ModelError(
        f"The original model is no longer in {source.path}.",
        code="original_not_found",
        hint="Say where it is: --against ORIGINAL.",
    )


def source_of(out: Path) -> SourceModel:
    """Return the origin of the model in ``out``, by its report. Raises ModelError ``original_not_found``.

    The report is in ``out`` itself or, of several models of one job, in the folder above.
    """
    for folder in (out, out.parent):
        with suppress(ConfigError):
            return read_report(folder).model
    raise ModelError(
        f"No report.json in {out} says which model it was made from.",
        code="original_not_found",
        hint="A chat compares a model with its original. Give that: --against ORIGINAL.",
    )


def _talk(chat: Chat, options: argparse.Namespace) -> None:
    console = Console()
    with explained(silence):
        if not options.prompt and not options.json and sys.stdin.isatty() and console.is_terminal:
            _converse(chat, console)
            return
        for prompt in options.prompt or _lines():
            chat.reset()
            turns = chat.say(prompt)
            if options.json:
                *_, last = turns
                print(last.model_dump_json(), flush=True)
            elif console.is_terminal:
                show_streamed(turns, console)
            else:
                *_, last = turns
                show_lines(last)


def _lines() -> Iterator[str]:
    for line in sys.stdin:
        if text := line.strip():
            yield text


def _converse(chat: Chat, console: Console) -> None:
    """Answer a person until /exit or the end of input; Ctrl-C ends an answer."""
    with suppress(ImportError):
        import readline  # noqa: F401, lets the person edit the line
    about = "" if chat.has_template else " The model has no chat template: each prompt is continued by itself."
    console.print(f"/reset starts a new conversation, /exit ends it.{about}", style="dim", highlight=False)
    while True:
        try:
            prompt = console.input("[bold]> [/]").strip()
        except EOFError:
            return
        if prompt == "/exit":
            return
        if prompt == "/reset":
            chat.reset()
        elif prompt:
            try:
                show_streamed(chat.say(prompt), console)
            except QuantError as error:
                explain(error)
            except KeyboardInterrupt:
                console.print("Interrupted: both models forget this turn.", style="dim")
