"""The engine's process: what it is given, what is heard of it, and that nothing of it survives."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from api.settings import Settings
from tests.support.waiting import give_time, wait_until
from worker.engine import Engine, EventLost, Stop, StopSwitch, engine_environment
from worker.memory_watch import MemoryLimit
from worker.torchrun import Node, engine_argv


def make(tmp_path: Path, program: str, **options: float) -> Engine:
    script = tmp_path / "engine.py"
    script.write_text(program)
    settings = Settings(
        database_url="x",
        broker_url="x",
        data_dir=tmp_path,
        engine_command=f"{{python}} -S {script}",
        engine_threads=3,
        confine_engine=False,
        **options,
    )  # type: ignore[arg-type]
    engine = Engine(settings, tmp_path / "task.json", limit=MemoryLimit(settings, None, "test"), project_id="prj_a")
    # somebody must read the log, or the engine stands still when the pipe is full
    threading.Thread(target=lambda: (tmp_path / "log").write_bytes(b"".join(engine.log_lines())), daemon=True).start()
    return engine


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pid: int) -> None:
    wait_until(lambda: not is_alive(pid), timeout_s=60)


def test_lines_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.pace.FREE_BYTES", 64 << 20)  # 20 MB of output at the usual pace take four minutes
    engine = make(
        tmp_path,
        r"""
import sys
print('{"kind": "a", "x": NaN, "y": "nul\\u0000", "z": ["1\\ud800", 1e999, "\\\\u0000", {"\\u0000": -Infinity}]}')
print("no json"); print('[1]'); print('{"no": "kind"}'); print('{"kind": 7}'); print("[" * 100000); print("")
print("a line of a library " * 1_000_000); print('{"kind": "long", "text": "' + "x" * 300000 + '"}')
print('{"kind": "z"}', end="")
print("to the log", sys.argv[1], file=sys.stderr)
sys.exit(7)
""",
    )
    first, long, last = engine.lines()
    replaced = ["1\ufffd", None, "\\u0000", {"\ufffd": None}]  # a backslash before it is no escape
    assert first == {"kind": "a", "x": None, "y": "nul\ufffd", "z": replaced}
    assert (long["kind"], len(long["text"]), last) == ("long", 300_000, {"kind": "z"})
    assert engine.wait() == 7
    assert engine.stopped_by is None
    wait_until(lambda: (tmp_path / "log").exists(), timeout_s=60)
    give_time(0.1)  # nothing more comes
    assert (tmp_path / "log").read_text() == f"to the log {tmp_path / 'task.json'}\n"


@pytest.mark.parametrize(
    "code",
    [
        r"""sys.stdout.buffer.write(b'{"kind": "\xff"}\n')""",
        """print('{"kind": "long", "text": "' + "x" * 5_000_000 + '"}')""",
        """print('{"kind": "deep", "x": ' + "[" * 100_000)""",
        """print('{"kind": "number", "x": ' + "9" * 5_000 + '}')""",
    ],
)
def test_no_event_is_lost_in_silence(code: str, tmp_path: Path) -> None:
    engine = make(tmp_path, f"""import sys\n{code}\nprint('{{"kind": "z"}}')""")
    with pytest.raises(EventLost) as lost:
        list(engine.lines())
    assert lost.value.code == "engine_event_lost" and '{"kind"' in lost.value.message
    engine.kill(Stop.LEASE_LOST)
    engine.wait()


def test_an_event_that_the_engines_end_cut_is_its_end(tmp_path: Path) -> None:
    engine = make(tmp_path, """print('{"kind": "a"}'); print('{"kind": "half', end="", flush=True)""")
    assert list(engine.lines()) == [{"kind": "a"}]
    assert engine.wait() == 0


@pytest.mark.parametrize(("signal_name", "status"), [("SIGKILL", 137), ("SIGSEGV", 139), ("SIGTERM", 143)])
def test_death_by_signal(signal_name: str, status: int, tmp_path: Path) -> None:
    engine = make(tmp_path, f"import os, signal; os.kill(os.getpid(), signal.{signal_name})")
    assert list(engine.lines()) == []
    assert engine.wait() == status


GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "300"])  # holds our stdout as well
print('{"kind": "pid", "pid": %d}' % child.pid, flush=True)
"""


def test_what_the_engine_leaves_behind_is_ended(tmp_path: Path) -> None:
    """Or the pipe would never close, and the GPU never be free."""
    engine = make(tmp_path, GRANDCHILD)
    started = time.monotonic()
    [line] = engine.lines()
    assert engine.wait() == 0
    assert time.monotonic() - started < 5
    wait_gone(line["pid"])


def test_stop_lets_it_tidy_up(tmp_path: Path) -> None:
    engine = make(
        tmp_path,
        """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('{"kind": "bye"}', flush=True), sys.exit(1)))
print('{"kind": "ready"}', flush=True)
time.sleep(60)
""",
        stop_grace_s=20,
    )
    lines = engine.lines()
    assert next(lines) == {"kind": "ready"}
    started = time.monotonic()
    engine.stop(Stop.CANCELLED)
    engine.stop(Stop.DRAINED)  # the first reason counts
    assert list(lines) == [{"kind": "bye"}]
    assert engine.wait() == 1
    assert time.monotonic() - started < 5
    assert engine.stopped_by is Stop.CANCELLED


def test_what_does_not_stop_is_killed(tmp_path: Path) -> None:
    engine = make(
        tmp_path,
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + GRANDCHILD + "time.sleep(60)",
        stop_grace_s=0.3,
    )
    lines = engine.lines()
    pid = next(lines)["pid"]
    engine.stop(Stop.DRAINED)
    assert list(lines) == []
    engine.wait()
    wait_gone(pid)
    assert engine.stopped_by is Stop.DRAINED


def test_kill_is_at_once_and_a_lost_lease_outweighs_a_cancel(tmp_path: Path) -> None:
    engine = make(
        tmp_path,
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + GRANDCHILD + "time.sleep(60)",
        stop_grace_s=60,
    )
    lines = engine.lines()
    pid = next(lines)["pid"]
    engine.stop(Stop.CANCELLED)
    engine.kill(Stop.LEASE_LOST)
    assert list(lines) == []
    assert engine.wait() == 137
    wait_gone(pid)
    assert engine.stopped_by is Stop.LEASE_LOST
    engine.stop(Stop.CANCELLED)  # after the end: nothing happens
    engine.kill(Stop.CANCELLED)
    assert engine.stopped_by is Stop.LEASE_LOST


@pytest.mark.parametrize(
    ("reasons", "signal_name", "reason"),
    [
        ((Stop.DRAINED, Stop.CANCELLED), "SIGTERM", Stop.DRAINED),
        ((Stop.CANCELLED, Stop.LEASE_LOST), "SIGKILL", Stop.LEASE_LOST),
    ],
    ids=["the first reason counts", "a lost lease ends it at once"],
)
def test_an_engine_that_starts_after_the_stop_ends_at_once(
    reasons: tuple[Stop, ...], signal_name: str, reason: Stop, tmp_path: Path
) -> None:
    switch = StopSwitch()
    for each in reasons:
        switch.stop(each)
    engine = switch.start(lambda: make(tmp_path, "import time; time.sleep(300)", stop_grace_s=60.0))
    assert list(engine.lines()) == []
    assert engine.wait() == 128 + signal.Signals[signal_name]
    assert (engine.stopped_by, switch.reason, switch.child) == (reason, reason, engine)


def test_the_environment_is_an_allow_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {
        "DATABASE_URL": "x", "BROKER_URL": "x", "BITFOUNDRY_DATA_DIR": "x", "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x", "PGPASSWORD": "x", "OPENAI_API_KEY": "x", "SSH_AUTH_SOCK": "x",
    }  # fmt: skip
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    settings = Settings(database_url="x", broker_url="x", data_dir=tmp_path, engine_threads=3)  # type: ignore[arg-type]
    given = engine_environment(settings)
    assert not secret.keys() & given.keys()
    assert not secret.keys() & engine_environment(settings, with_hub=True).keys()
    assert (given["CUDA_VISIBLE_DEVICES"], given["NCCL_SOCKET_IFNAME"]) == ("1", "ib0")
    assert (given["OMP_NUM_THREADS"], given["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
    assert given["PATH"]
    assert engine_argv(settings) == [sys.executable, "-m", "quantcore", "run"]
    for ranks, threads in ((1, "3"), (2, "1"), (4, "1")):  # ranks share them, and none has less than one
        shared = engine_environment(settings.model_copy(update={"engine_ranks": ranks}))
        assert (shared["OMP_NUM_THREADS"], shared["MKL_NUM_THREADS"]) == (threads, threads)
    many = settings.model_copy(update={"engine_threads": 128, "engine_ranks": 8})
    assert engine_environment(many)["OMP_NUM_THREADS"] == "16"
    several = engine_argv(settings.model_copy(update={"engine_ranks": 4}))
    assert several[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert several[several.index("--nproc-per-node") + 1] == "4" and several[-3:] == ["-m", "quantcore", "run"]


def test_a_node_of_several_is_told_where_the_first_one_is(tmp_path: Path) -> None:
    """Also where each has one process; what stands around the launcher stays as it was set."""
    settings = Settings(database_url="x", broker_url="x", data_dir=tmp_path)  # type: ignore[arg-type]
    node = Node(rank=1, count=3, host="gpu-7", port=4711, run_id="job_x.5")
    given = engine_argv(settings, node)
    flags = dict(zip(given[3:-3:2], given[4:-3:2], strict=True))
    assert (given[:3], given[-3:]) == ([sys.executable, "-m", "torch.distributed.run"], ["-m", "quantcore", "run"])
    assert flags == {
        "--nnodes": "3", "--node-rank": "1", "--rdzv-backend": "static", "--rdzv-id": "job_x.5",
        "--master-addr": "gpu-7", "--master-port": "4711", "--nproc-per-node": "1", "--max-restarts": "0",
    }  # fmt: skip
