"""Runs the proof in a fresh process, and relays its events: JSON lines, as those of a job."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from quantcore.config.task import Task
from quantcore.engine.runtime.devices import held_memory_bytes, peak_memory_bytes
from quantcore.engine.verification.expectation import ExpectedDigests
from quantcore.engine.verification.verify import Proof
from quantcore.errors import ModelError, ProofError
from quantcore.events import Emit, parse
from quantcore.sandbox.fork_server import ENDED, waiting
from quantcore.sandbox.opening import seen_so_far

STAMPS = "stamps.json"
_PROOF = TypeAdapter(Proof)


@dataclass(frozen=True)
class Proved:
    """Answer of the fresh process: the proof of each export, and its peak memory with what the waiting one held."""

    proofs: dict[str, Proof]
    peak_memory_bytes: int


def prove_in_fresh_process(task: Task, folder: Path, expected: ExpectedDigests, emit: Emit) -> Proved:
    """Let a fresh process verify ``folder``, and relay its events: see ``fork_server``.

    Raises ProofError with its message, and ModelError ``model_changed`` (see ``opening.unchanging``).
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".proof-") as scratch:
        expected.move_to(Path(scratch))
        held = held_memory_bytes() or peak_memory_bytes()
        (Path(scratch) / "task.json").write_text(task.model_dump_json(), "utf-8")
        (Path(scratch) / STAMPS).write_text(json.dumps(seen_so_far()), "utf-8")
        proofs: dict[str, Proof] = {}
        peak, status = 0, -1
        failure: dict[str, Any] = {}
        with closing(_lines_of(folder, Path(scratch))) as lines:
            for line in lines:
                data = json.loads(line)
                if data["kind"] == "proof":
                    proofs[data["proof"]["export"]] = _PROOF.validate_python(data["proof"])
                elif data["kind"] == "failed":
                    failure = data
                elif data["kind"] == "peak_memory":
                    peak = data["bytes"]
                elif data["kind"] == ENDED:
                    status = data["status"]
                else:
                    emit(parse(data))
        if status != 0 or failure:
            kind = ModelError if failure.get("code") == "model_changed" else ProofError
            raise kind(
                failure.get("message", f"The proof process ended with status {status}."),
                code=failure.get("code", "proof_crashed"),
                hint=failure.get("hint", "See the log above."),
                retryable=not failure,
            )
    return Proved(proofs, held + peak)


def _lines_of(folder: Path, scratch: Path) -> Generator[str]:
    """Yield what a fresh process says of ``folder``, with its exit status at last. It ends if this is closed before."""
    if (standby := waiting()) is not None:
        is_done = False
        try:
            yield from standby.verify(folder, scratch)
            is_done = True
        finally:
            if not is_done:
                standby.end()
        return
    command = [sys.executable, "-m", "quantcore", "verify", str(folder), str(scratch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield from process.stdout
            yield json.dumps({"kind": ENDED, "status": process.wait()})
        finally:
            process.kill()


def proof_line(proof: Proof) -> str:
    """Return the JSON line in which the fresh process reports one export."""
    return json.dumps({"kind": "proof", "proof": _PROOF.dump_python(proof, mode="json")})


def peak_line() -> str:
    """Return the JSON line in which the fresh process reports its peak memory at its end."""
    return json.dumps({"kind": "peak_memory", "bytes": peak_memory_bytes()})
