"""Jobs on forks of the test's process, which has loaded everything already, so that ranks start at once."""

import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantcore.checkpoint.artifact import sha256
from quantcore.config import presets
from quantcore.config.task import Task
from quantcore.engine.pipeline import job as pipeline

NUM_WINDOWS = 70  # four chunks of windows, which do not divide it
START_S = 240


def config(preset: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {**presets.resolve(preset).to_dict(), "algo_config": list(steps)}


def task_file(
    model_dir: Path, output_dir: Path, given: dict[str, Any],
    exports: Sequence[str] = ("quark", "fake_quantized"), **more: Any,
) -> Path:  # fmt: skip
    file = output_dir.with_suffix(".json")
    task = {
        "model_dir": str(model_dir), "output_dir": str(output_dir), "config": given, "export": exports,
        "calibration": {"num_samples": NUM_WINDOWS, "seq_len": 32},
        "evaluation": {"num_windows": 5, "seq_len": 32, "num_prompts": 0}, **more,
    }  # fmt: skip
    file.write_text(json.dumps(task))
    pipeline.read_windows(Task.model_validate(task))  # once, before the fork (see ``each_text_is_tokenized_once``)
    return file


def forked(work: Callable[[int], int], size: int, folder: Path) -> list[int | None]:
    """Run ``size`` ranks that call ``work(rank)``, with output to files in ``folder``; return their exit statuses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def rank_main(rank: int) -> None:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.exit(work(rank))

    ranks = [multiprocessing.get_context("fork").Process(target=rank_main, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(START_S)
    return [process.exitcode for process in ranks]


def events_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"out.{rank}").read_text().splitlines()]


def seen_of(folder: Path, output_dir: Path) -> tuple[dict[str, str], float, float, list[str], list[str]]:
    """Return the digests of all weights, both perplexities, the events of layers, and the report's layers."""
    files = {path.relative_to(output_dir).as_posix(): sha256(path) for path in output_dir.rglob("*.safetensors")}
    events = events_of(folder)
    [summary] = [event["summary"] for event in events if event["kind"] == "completed"]
    messages = sorted(json.dumps(event) for event in events if event["kind"] in ("layer_quantized", "warned"))
    report = json.loads((output_dir / "report.json").read_text())
    layers = [layer["name"] for layer in report["layers"]]
    return files, summary["perplexity_before"], summary["perplexity_after"], messages, layers


def killed(owner: Any, name: str, count: int) -> Callable[..., Any]:
    """Return ``owner.name`` unchanged, except that call number ``count`` kills the process."""
    whole, calls = getattr(owner, name), []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*arguments, **options)

    return call
