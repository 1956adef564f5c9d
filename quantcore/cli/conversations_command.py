"""``bitfoundry conversations MODEL -o FILE``: lets a chat model write conversations to calibrate it on."""

from __future__ import annotations

import argparse
from typing import Any

from quantcore.cli.flags import TEMPLATE_ARGUMENTS, new_file, positive
from quantcore.cli.grammar import Flags, add_model
from quantcore.cli.inputs import check_models
from quantcore.cli.running import print_json, shown
from quantcore.events import Emit

NUM_TOKENS = 24_000


def parser() -> Flags:
    flags = Flags(
        prog="bitfoundry conversations",
        usage="%(prog)s MODEL -o FILE.jsonl [flags]",
        description="Let a chat model write conversations, questions and answers, to calibrate it on what it says"
        " itself: for bitfoundry quantize --dataset. The model is in memory as a whole.",
        epilog="Mix them with the built-in text: bitfoundry quantize MODEL w4a16 --dataset FILE.jsonl:0.5,builtin:0.5",
    )
    add_model(flags)
    where = "file to write, such as own-chats.jsonl; it must not exist"
    flags.add_argument("-o", "--output", type=new_file, required=True, metavar="FILE", help=where)
    flags.add_argument(
        "--num_tokens", type=positive, default=NUM_TOKENS,
        help="write at least as many tokens; the default is enough for 32 windows of 512 tokens, of which a job holds"
        " back a quarter (default: %(default)s)",
    )  # fmt: skip
    flags.add_argument("--chat_template_kwargs", **TEMPLATE_ARGUMENTS)
    flags.add_argument("--seed", type=int, default=0, help="random seed of what the model writes (default: 0)")
    flags.add_argument("--json", action="store_true", help="print the result as JSON")
    return flags


def run(options: argparse.Namespace) -> int:
    """Write the file that the flags ask for, and return the exit status."""

    def work(emit: Emit) -> dict[str, Any]:
        check_models(options.model_dir)
        from quantcore.engine.commands.conversations import conversations
        from quantcore.engine.runtime.devices import limit_threads

        limit_threads()
        arguments = options.chat_template_kwargs or {}
        return conversations(options.model_dir, options.output, options.num_tokens, arguments, options.seed, emit)

    def show(done: dict[str, Any]) -> None:
        num, dropped = done["num_conversations"], done["dropped"]
        print(f"Wrote {num} conversations of {done['num_tokens']} tokens: {done['file']}")
        if dropped:
            listed = ", ".join(f"{count} {fault}" for fault, count in dropped.items())
            print(f"Left out {sum(dropped.values())} others: {listed}")

    return shown(work, print_json if options.json else show)
