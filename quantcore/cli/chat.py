"""``bitfoundry chat MODEL``: the answers of a quantized model and its original, side by side; or those of one model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from quantcore.cli.chat_view import show_json, show_lines, show_streamed
from quantcore.cli.console import explain
from quantcore.cli.explain import explained
from quantcore.cli.flags import positive
from quantcore.cli.grammar import Flags, add_model
from quantcore.cli.inputs import check_models, find_merged
from quantcore.cli.running import shown
from quantcore.errors import ConfigError, ModelError, QuantError
from quantcore.events import Emit, Warned, silence
from quantcore.report.answers import MAX_NEW_TOKENS
from quantcore.report.compare import read_report
from quantcore.report.values import SourceModel

if TYPE_CHECKING:
    from quantcore.engine.chat.chat import Chat


GIVE_ORIGINAL = "It answers alone; to see both models side by side, name the original: --against ORIGINAL."


def parser() -> Flags:
    flags = Flags(
        prog="bitfoundry chat",
        usage="%(prog)s MODEL [--against ORIGINAL | --alone] [flags]",
        description="Chat with a quantized model and its original: both answers side by side, and where they part. "
        "A model without a report answers alone. Decoding is greedy. Models are held in memory dequantized, in the "
        "dtype of their floats.",
        epilog="In a terminal, /reset starts a new conversation and /exit ends it. Without a terminal, each line of "
        "standard input is a prompt by itself.",
    )
    add_model(flags, "result: its folder, GGUF file, id, name or `last`; or any other model")
    original = flags.add_mutually_exclusive_group()
    original.add_argument(
        "--against",
        metavar="ORIGINAL",
        help="original model: folder, GGUF file, or model on the Hub (default: the one that MODEL's report.json names)",
    )
    original.add_argument("--alone", action="store_true", help="chat with MODEL only: the original is not loaded")
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
    """Load the models, then answer the prompts of the options, of standard input or of a person."""
    with ExitStack() as stack:

        def load(emit: Emit) -> Chat:
            folder = find_artifact(Path(options.model_dir))
            source = None if options.alone or options.against else source_of(folder)
            against: str | None = original_of(source) if source else options.against
            if against is not None:
                check_models(against)
            elif not options.alone:
                emit(Warned("answers_alone", f"No report names the original of {folder}. {GIVE_ORIGINAL}"))
            from quantcore.engine.chat.chat import open_chat, open_chat_alone
            from quantcore.engine.evaluation.inputs import find_model
            from quantcore.engine.runtime.devices import limit_threads

            limit_threads()
            if against is None:
                return stack.enter_context(open_chat_alone(folder, options.max_new_tokens))
            original = find_model(against, emit)
            adapter = find_merged(source.adapter, emit) if source and source.adapter else None
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


def original_of(source: SourceModel) -> str:
    """Return the folder of the model, or its id on the Hub. Raises ModelError ``original_not_found``."""
    if source.path is not None and Path(source.path).exists():
        return source.path
    if source.path is None and source.id is not None:
        return source.id
    raise ModelError(
        f"The original model is no longer in {source.path}.",
        code="original_not_found",
        hint="Say where it is: --against ORIGINAL, or chat without it: --alone.",
    )


def source_of(out: Path) -> SourceModel | None:
    """Return the origin of the model in ``out``, by its report; None without one.

    The report is in ``out`` itself or, of several models of one job, in the folder above.
    """
    for folder in (out, out.parent):
        with suppress(ConfigError):
            return read_report(folder).model
    return None


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
                show_json(last)
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
                console.print("Interrupted: this turn is forgotten.", style="dim")
