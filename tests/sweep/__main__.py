"""``make sweep``: quantize a tiny model of every class that the installed Transformers has, and write a table."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.sweep.classes import TASKS, ModelClass, model_classes
from tests.sweep.quantizing import WAYS, Outcome, Row, quantize_class
from tests.sweep.table import write_table

TIMEOUT_S = 600.0


def sweep(classes: Sequence[ModelClass], num_processes: int) -> Iterator[Row]:
    """Yield a row for each class, each made in a process of its own: what crashes or hangs costs one row."""
    context, waiting, running = multiprocessing.get_context("fork"), list(classes), {}
    while waiting or running:
        while waiting and len(running) < num_processes:
            model_class = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_row_of, args=(model_class, sender))
            process.start()
            sender.close()
            running[receiver] = process, model_class
        ready = wait(running, timeout=TIMEOUT_S)
        for receiver in ready or list(running):
            process, model_class = running.pop(receiver)
            yield _received(receiver, model_class, is_ready=bool(ready))
            process.kill()
            process.join()


def _row_of(model_class: ModelClass, sender: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sender.send(quantize_class(model_class))


def _received(receiver: Connection, model_class: ModelClass, *, is_ready: bool) -> Row:
    try:
        return receiver.recv() if is_ready else _failed(model_class, f"no result within {TIMEOUT_S:.0f} s")
    except EOFError:
        return _failed(model_class, "its process died")


def _failed(model_class: ModelClass, why: str) -> Row:
    return Row(model_class, {way: Outcome("crashed", why) for way in WAYS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes or model types; default: all")
    parser.add_argument("--kinds", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--table", type=Path, help="write the table here")
    options = parser.parse_args()
    classes = [
        each for each in model_classes(tuple(options.kinds))
        if not options.names or each.name in options.names or each.model_type in options.names
    ]  # fmt: skip
    rows = []
    for number, row in enumerate(sweep(classes, options.processes), 1):
        rows.append(row)
        verdicts = {way: outcome.verdict for way, outcome in row.outcomes.items()}
        print(f"{number}/{len(classes)} {row.model_class}: {row.not_built or verdicts}", flush=True)
        if options.json:  # written anew after each row, so that a sweep that is cut short leaves what it has
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
        if options.table:
            write_table(rows, options.table)


if __name__ == "__main__":
    main()
