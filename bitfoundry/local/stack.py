"""The whole service on one machine: the production code, with its engines from wheels on unix sockets.

    with LocalStack(home) as stack:
        Client(stack.url, stack.api_key).submit(...)

DATABASE_URL or BROKER_URL in the environment replaces the engine of that name.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx2

from bitfoundry.client.connection import Connection, default_home
from bitfoundry.errors import StackError
from bitfoundry.local.child import finish, spawn, tail
from bitfoundry.local.folders import Lock, cache_dir, private_dir
from bitfoundry.local.postgres import Postgres
from bitfoundry.local.supervision import Say, Supervised
from bitfoundry.local.valkey import Valkey
from quantcore.config.time_limits import LOCAL_S
from quantcore.errors import ConfigError

__all__ = ["LocalStack", "Postgres", "Valkey"]

DEFAULT_PORT = 8765
READY_LIMIT_S = 90.0
API_STOP_S = 15.0
SLOT_BYTES = 3 * 10**9  # for each of several slots: twice what a small model takes
WORKER_STOP_S = 60.0  # the worker gives an engine 30 s to end before it kills it


class Program:
    """The API or the worker as a child process. It runs in `home`, where no folder can shadow our packages."""

    def __init__(self, name: str, args: Sequence[str], home: Path, environment: Mapping[str, str]) -> None:
        self.name = f"the {name}"
        self.log = home / "logs" / f"{name}.log"
        self._command = [sys.executable, "-m", *args]
        self._home = home
        self._environment = environment
        self.start_again()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return None while it runs, else its exit status."""
        return self._process.poll()

    def start_again(self) -> None:
        self._process = spawn(self._command, log=self.log, cwd=self._home, env=self._environment)

    def drain(self) -> None:
        """Tell the program to end in order."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, limit_s: float) -> None:
        """Wait until the program has ended, or the time is up."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def kill(self) -> None:
        finish(self._process, [])


class LocalStack:
    """PostgreSQL, Valkey, the API on 127.0.0.1 and one worker, all children of this process.

    Start it from the main thread. `start` sets `url` and `api_key`, which are also in `home`/connection.json (0600),
    where the commands find them, and `database_url`. `port` 0 takes a free one. The worker runs as many jobs at once as
    it has `slots`, each on its share of the cores; fewer if the memory holds fewer. With `shows_local_runs` the
    dashboard also has what this user's command line made.
    """

    def __init__(
        self,
        home: Path | None = None,
        port: int = DEFAULT_PORT,
        *,
        model_roots: Sequence[Path] = (),
        slots: int = 1,
        shows_local_runs: bool = False,
        say: Say = lambda message: None,
    ) -> None:
        self.home = Path(home or default_home()).resolve()
        self.url = ""
        self.api_key = ""
        self.database_url = ""
        self._port = port
        usual = dict.fromkeys(root.resolve() for root in (Path.home(), Path.cwd(), cache_dir()))
        self._model_roots = [*model_roots] or [root for root in usual if not root.is_relative_to(self.home)]
        self._slots = slots
        self._shows_local_runs = shows_local_runs
        self._say = say
        self._engines: list[Postgres | Valkey] = []
        self._programs: dict[str, Program] = {}
        self._tended: list[Supervised] = []
        self._lock = Lock(self.home / "stack.lock")

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def dashboard_link(self) -> str:
        """The sign-in link of the dashboard. The part after # stays in the browser, out of requests and logs."""
        return f"{self.url}/ui/#key={self.api_key}"

    def start(self) -> None:
        """Start everything and wait until the API says that it is ready. Raises StackError."""
        private_dir(self.home)
        private_dir(self.logs)
        self._lock.acquire()
        try:
            self._port = _free_port(self._port)
            self.url = f"http://127.0.0.1:{self._port}"
            self.database_url, broker_url = self._start_engines()
            self._migrate(self.database_url)
            environment = self._settings(self.database_url, broker_url)
            api = ["api", "serve", "--port", str(self._port)]
            self._programs["api"] = Program("api", api, self.home, environment)
            self._programs["worker"] = Program("worker", ["worker"], self.home, environment)
            self._say("waiting for the API")
            self._await_ready()
            self.api_key = self._find_or_make_key(self.database_url)
            self._tended = [Supervised(part, self._say) for part in (*self._engines, *self._programs.values())]
        except BaseException:
            self.stop()
            raise

    def tend(self) -> None:
        """Restart parts that have ended by themselves; call it about every second.

        Returns at once, and never gives up: a part that keeps ending is started ever more rarely."""
        for tended in self._tended:
            tended.look()
        for engine in self._engines:
            if isinstance(engine, Postgres) and engine.poll() is None:
                engine.ballast.make()

    def stop(self) -> None:
        """End everything in order: API and worker drain side by side, then the engines. A second Ctrl-C kills them."""
        self._tended.clear()
        try:
            for program in self._programs.values():
                program.drain()
            limits = {"api": API_STOP_S, "worker": WORKER_STOP_S}
            for name, program in self._programs.items():
                program.wait(limits[name])
        finally:
            for program in self._programs.values():
                program.kill()
            self._programs.clear()
            while self._engines:
                self._engines.pop().stop()
            self._lock.release()

    def __enter__(self) -> "LocalStack":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _start_engines(self) -> tuple[str, str]:
        """Start our engines and return (database URL, broker URL). The environment's URLs replace ours."""
        urls = []
        for variable, engine in (("DATABASE_URL", Postgres), ("BROKER_URL", Valkey)):
            if url := os.environ.get(variable):
                urls.append(url)
                continue
            self._say(f"starting {engine.__name__}")
            server = engine(self.home)
            urls.append(server.start())
            self._engines.append(server)
        return urls[0], urls[1]

    def _migrate(self, database_url: str) -> None:
        from api.store import migrate  # here: only the stack needs SQLAlchemy

        self._say("updating the database schema")
        try:
            migrate.upgrade(database_url)
        except ConfigError as error:
            raise StackError(f"{self.home}: {error.message}", hint=error.hint) from error

    def _settings(self, database_url: str, broker_url: str) -> dict[str, str]:
        roots = [str(Path(root).expanduser().resolve()) for root in self._model_roots]
        secret_key = self._find_or_make_secret_key()
        ours = {"BITFOUNDRY_SECRET_KEY_FILE": str(secret_key)} if secret_key else {}
        ours |= {"DATABASE_URL": database_url, "BROKER_URL": broker_url, "BITFOUNDRY_DATA_DIR": str(self.home)}
        ours |= {"BITFOUNDRY_MODEL_ROOTS": os.pathsep.join(roots)}
        if self._shows_local_runs:
            ours["BITFOUNDRY_SHOW_LOCAL_RUNS"] = "true"
        from quantcore.plan.this_machine import host_memory_bytes  # here, as above

        slots = min(self._slots, host_memory_bytes() // SLOT_BYTES)
        if slots > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // slots)
            ours |= {"BITFOUNDRY_SLOTS": str(slots), "BITFOUNDRY_ENGINE_THREADS": str(threads)}
        return os.environ | ours

    def _find_or_make_secret_key(self) -> Path | None:
        """Return the file of the key that encrypts secrets, or None if the environment names one."""
        from api.store import vault  # here, as above

        if os.environ.get("BITFOUNDRY_SECRET_KEY") or os.environ.get("BITFOUNDRY_SECRET_KEY_FILE"):
            return None
        path = self.home / "secret.key"
        if not path.exists():
            vault.write_new_key(path)
        return path

    def _await_ready(self) -> None:
        limit = time.monotonic() + READY_LIMIT_S
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=LOCAL_S) as session:
            while time.monotonic() < limit:
                for program in self._programs.values():
                    if (status := program.poll()) is not None:
                        raise StackError(
                            f"{program.name} ended immediately (status {status}):\n{tail(program.log)}",
                            hint=f"see {program.log}",
                        )
                with suppress(httpx2.TransportError):
                    if session.get("/healthz/ready").status_code == 200:
                        return
                time.sleep(0.1)
        raise StackError(f"the API was not ready after {READY_LIMIT_S:.0f} s", hint=f"see {self.logs / 'api.log'}")

    def _find_or_make_key(self, database_url: str) -> str:
        """Return the API key of an earlier run if it still has all scopes, else a new one."""
        from api.http.security import create_key  # here, as above

        connection = Connection.read(self.home)
        key = (
            connection.api_key
            if connection and self._accepts(connection.api_key)
            else create_key(database_url, "local")
        )
        Connection(url=self.url, api_key=key).write(self.home)
        return key

    def _accepts(self, key: str) -> bool:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=self.url, trust_env=False, headers=headers, timeout=READY_LIMIT_S) as session:
            answer = session.get("/v1/keys/self")
        return answer.status_code == 200 and {"jobs:chat", "admin", "operator"} <= set(answer.json()["scopes"])


def _free_port(wanted: int) -> int:
    """Return `wanted`, or a free port for 0. Raises StackError if another program listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise StackError(f"port {wanted}: {error.strerror}", hint="choose another with --port") from None
        return int(probe.getsockname()[1])
