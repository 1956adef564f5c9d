"""A real Slurm cluster of two nodes on this machine, from Debian's packages ``slurm-wlm`` and ``munge``. Needs root.

Each node has one core and 4,000 MB. The partition ``high`` preempts the jobs of ``main``, which start again later.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import wait_until

KEY = Path("/etc/munge/munge.key")


class Cluster:
    """A running cluster. ``environment`` is what its commands need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.environment = os.environ | {"SLURM_CONF": str(self.config)}
        self._ports = [_free_port() for _ in range(3)]
        host = socket.gethostname().partition(".")[0]
        for name in ("state", "log", "spool"):
            (folder / name).mkdir()
        self.config.write_text(
            f"""ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmctldPort={self._ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
JobRequeue=1
KillWait=5
SlurmdTimeout=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} Port={self._ports[1]} CPUs=1 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} Port={self._ports[2]} CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=high Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=10
"""
        )

    def start(self) -> None:
        _start_munge()
        self.start_controller()
        for node in ("n1", "n2"):
            self.start_node(node)
        wait_until(lambda: self.ask("sinfo", "-h", "-p", "main", "-o", "%A").strip() == "0/2", note=self._logs)

    def start_controller(self) -> None:
        subprocess.run(["slurmctld"], env=self.environment, check=True)

    def start_node(self, node: str) -> None:
        subprocess.run(["slurmd", "-N", node], env=self.environment, check=True)

    def kill(self, daemon: str) -> None:
        """Kill ``slurmctld`` or the daemon of a node, ``slurmd-n1``, with SIGKILL."""
        file = self.folder / f"{daemon}.pid"
        pid = int(file.read_text())
        os.kill(pid, 9)
        wait_until(lambda: not Path(f"/proc/{pid}/cwd").exists())
        file.unlink(missing_ok=True)

    def stop(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self.ask("scancel", "--user=root", "--signal=KILL", "--full")
            self.ask("scancel", "--user=root")
        for file in self.folder.glob("*.pid"):
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text()), 15)
        deadline = time.monotonic() + 15
        while list(self.folder.glob("*.pid")) and time.monotonic() < deadline:
            time.sleep(0.1)

    def ask(self, *command: str) -> str:
        """Run a command of Slurm and return what it prints."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def jobs(self, *states: str) -> list[list[str]]:
        """Return number, name, state and nodes of the jobs in these states (default: those not over)."""
        chosen = [f"--states={','.join(states)}"] if states else []
        lines = self.ask("squeue", "-h", "-o", "%A|%j|%T|%N", *chosen).splitlines()
        return [line.split("|") for line in lines]

    def start_requeued(self) -> None:
        """Let the jobs that were requeued start now, and not two minutes later, as Slurm does."""
        for number, *_ in self.jobs("PENDING"):
            self.ask("scontrol", "update", f"jobid={number}", "StartTime=now")

    def occupy(self, seconds: int, *options: str) -> str:
        """Submit a job that takes both nodes for a time; return its number."""
        wrap = f"--wrap=srun sleep {seconds}"
        command = ("sbatch", "--parsable", "--nodes=2", "--output=/dev/null", "--job-name=filler", *options, wrap)
        return self.ask(*command).strip()

    def _logs(self) -> str:
        return "\n".join(file.read_text()[-2000:] for file in (self.folder / "log").iterdir())


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    missing = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    assert not missing, f"{missing} not installed: as root, `make slurm-for-tests`"
    folder.mkdir(parents=True)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _start_munge() -> None:
    """Start the daemon that signs messages, unless it runs."""
    works = subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0
    if works:
        return
    if not KEY.exists() or not KEY.stat().st_size:
        KEY.write_bytes(os.urandom(1024))
        shutil.chown(KEY, "munge", "munge")
        KEY.chmod(0o400)
    socket_folder = Path("/run/munge")
    socket_folder.mkdir(exist_ok=True)
    shutil.chown(socket_folder, "munge", "munge")
    subprocess.run(["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged"], check=True)


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
