"""A STUB of the engine, for tests of the service only: it quantizes nothing. Run like the real one, with a task file.

It prints real events and writes a real manifest. ``stub.json`` in the model folder says what to do:
``mode`` (see below; by default all goes well at once), ``stays_in``: a phase that it does not leave, ``pids``: a file
to note its own and a grandchild's process id in, ``environment``: a file to write its environment to, ``task``: one for
its task, ``log``: a text to print and to warn of, ``block_s``: seconds of each of the 20 blocks of ``steady``. As
node 1 or higher of several it reports and writes no result: ``node_mode`` is its mode (``waits``: until it is ended;
``eats``: memory; ``fails``; ``ends late``: well, after the leader; by default it ends well at once), ``node_pids`` its
file for process ids.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

UNTIL_ENDED_S = 1200
"""Far longer than a test waits for anything (``waiting.PATIENCE_S``): who stays is ended, however slow the machine."""
SUMMARY = {
    "size_before_bytes": 38000,
    "size_after_bytes": 19000,
    "worst_layer": {"name": "l0", "relative_error": 0.01, "sqnr_db": 40.0},
    "num_layers_quantized": 1,
    "num_layers_kept": 0,
    "quantize_s": 0.5,
    "total_s": 1.0,
    "peak_memory_bytes": 1000,
    "planned_peak_memory_bytes": 1000,
    "gate": "warn",
    "exports": {},
    "note": "stub\0",
}


def say(kind: str, **data: object) -> None:
    print(json.dumps({"kind": kind, **data}), flush=True)


def write_output(output: Path, *, tamper: bool) -> None:
    files = {"model.safetensors": b"not really weights " * 1000, "sub/report.json": b'{"summary": {}}'}
    entries = []
    for name, data in files.items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entries.append({"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    if tamper:
        (output / "model.safetensors").write_bytes(b"X" + files["model.safetensors"][1:])
    (output / "MANIFEST.json").write_text(json.dumps({"format": 1, "files": entries}))


def eat() -> None:
    """Take memory, 64 MiB at a time, until somebody ends this."""
    taken = []
    while len(taken) < 160:
        taken.append(b"x" * (64 << 20))
        time.sleep(0.01)
    time.sleep(UNTIL_ENDED_S)


def note_pids(path: str) -> None:
    grandchild = subprocess.Popen(["sleep", "300"])
    with Path(path).open("a") as file:
        file.write(json.dumps([os.getpid(), grandchild.pid]) + "\n")


def work_as_node(stub: dict[str, str]) -> int:
    print("stub engine starts", file=sys.stderr, flush=True)
    if "node_pids" in stub:
        note_pids(stub["node_pids"])
    if stub.get("node_mode") == "eats":
        eat()
    if stub.get("node_mode") == "waits":
        time.sleep(UNTIL_ENDED_S)
    if stub.get("node_mode") == "fails":
        say("failed", code="nonfinite_weights", message="NaN in a", hint="", retryable=False, rank=1, block=7)
        return 1
    if stub.get("node_mode") == "ends late":
        time.sleep(1.5)
        print("stub engine ends", file=sys.stderr, flush=True)
    return 0


def main() -> int:
    task = json.loads(Path(sys.argv[-1]).read_text())
    model = Path(task["model_dir"])
    stub = json.loads((model / "stub.json").read_text()) if (model / "stub.json").exists() else {}
    mode = stub.get("mode", "fast")
    if "--node-rank" in sys.argv and sys.argv[sys.argv.index("--node-rank") + 1] != "0":
        return work_as_node(stub)
    print("stub engine starts", file=sys.stderr, flush=True)
    if mode == "ignores_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "pids" in stub:
        note_pids(stub["pids"])
    if "environment" in stub:
        Path(stub["environment"]).write_text(json.dumps(dict(os.environ)))
    if "task" in stub:
        Path(stub["task"]).write_text(json.dumps(task))

    if "log" in stub:
        print(stub["log"], file=sys.stderr, flush=True)
        say("warning", code="said", message=stub["log"])

    for line in stub.get("raw", ()):
        print(line, flush=True)

    if "stays_in" in stub:
        say("phase_started", phase=stub["stays_in"])
        time.sleep(UNTIL_ENDED_S)
    if mode == "kills_its_worker":  # whose child is the keeper, whose child we are
        keeper = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(keeper.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(UNTIL_ENDED_S)

    say("phase_started", phase="quantize")
    say("progress", phase="quantize", done=0, total=2, unit="block", eta_s=None)
    if mode in ("slow", "ignores_sigterm"):
        time.sleep(UNTIL_ENDED_S)
    if mode == "eats":
        eat()
    if mode == "slow_once":  # the second attempt is quick
        mark = model / "was_here"
        if not mark.exists():
            mark.touch()
            time.sleep(UNTIL_ENDED_S)
    if mode == "goes_on":  # the first attempt stays until it is ended, the second finds what that has kept
        kept = Path(task["resume_dir"]) / "kept"
        if not kept.exists():
            kept.parent.mkdir()
            kept.write_text("half of the work")
            say("progress", phase="quantize", done=1, total=2, unit="block", eta_s=None)
            time.sleep(UNTIL_ENDED_S)
        say("warning", code="went_on", message=kept.read_text())
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode in ("fails", "fails_retryable"):
        say("failed", code="nonfinite_weights", message="NaN in a", hint="Give another.", retryable=mode != "fails")
        return 1
    if mode == "rejects":
        write_output(Path(f"{task['output_dir']}.rejected"), tamper=False)
        say("failed", code="gate_failed", message=f"G8, gate {task['gate']}", hint="Take a finer one.", retryable=False)
        return 1
    for block in range(20):
        say("layer_quantized", name=f"l{block}", block=block, relative_error=0.01, sqnr_db=40.0, scheme="int8")
        say("progress", phase="quantize", done=block, total=20, unit="block", eta_s=float("nan"))
        time.sleep(stub.get("block_s", 0.1) if mode == "steady" else 0)
    say("phase_started", phase="export")
    write_output(Path(task["output_dir"]), tamper=mode == "tamper")
    print("this is not JSON", flush=True)
    say("completed", summary=SUMMARY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
