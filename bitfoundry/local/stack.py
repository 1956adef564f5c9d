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
from bitfoundry.local.tending import Say, Tended
from bitfoundry.local.valkey import Valkey

__all__ = ["LocalStack", "Postgres", "Valkey"]

DEFAULT_PORT = 8765
READY_LIMIT_S = 90.0
API_STOP_S = 15.0
WORKER_STOP_S = 60.0  # the worker gives an engine 30 s to end before it kills it


class Program:
    """The API or the worker: this Python, in `home`, where no folder can pass for one of our packages."""

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
        """None while it runs, else the status it ended with."""
        return self._process.poll()

    def start_again(self) -> None:
        self._process = spawn(self._command, log=self.log, cwd=self._home, env=self._environment)

    def drain(self) -> None:
        """Tell it to end in order."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, limit_s: float) -> None:
        """Until it has ended, or the time is up."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def kill(self) -> None:
        finish(self._process, [])


class LocalStack:
    """PostgreSQL, Valkey, the API on 127.0.0.1 and one worker, all children of this process.

    Start it from the main thread. `url` and `api_key` are there after `start`; both also lie in
    `home`/connection.json (0600), where the commands
    find them. `port` 0 takes a free one.
    """

    def __init__(
        self,
        home: Path | None = None,
        port: int = DEFAULT_PORT,
        *,
        model_roots: Sequence[Path] = (),
        say: Say = lambda message: None,
    ) -> None:
        self.home = Path(home or default_home()).resolve()
        self.url = ""
        self.api_key = ""
        self._port = port
        usual = [root.resolve() for root in (Path.home(), Path.cwd(), cache_dir())]
        self._model_roots = [*model_roots] or [root for root in usual if not root.is_relative_to(self.home)]
        self._say = say
        self._engines: list[Postgres | Valkey] = []
        self._programs: dict[str, Program] = {}
        self._tended: list[Tended] = []
        self._lock = Lock(self.home / "stack.lock")

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def dashboard_link(self) -> str:
        """Opens the dashboard and signs in: what is behind the # stays in the browser, in no request and no log."""
        return f"{self.url}/ui/#key={self.api_key}"

    def start(self) -> None:
        """Start everything and wait until the API says that it is ready. StackError says what is in the way."""
        private_dir(self.home)
        private_dir(self.logs)
        self._lock.acquire()
        try:
            self._port = _free_port(self._port)
            self.url = f"http://127.0.0.1:{self._port}"
            database_url, broker_url = self._start_engines()
            self._migrate(database_url)
            environment = self._settings(database_url, broker_url)
            api = ["api", "serve", "--port", str(self._port)]
            self._programs["api"] = Program("api", api, self.home, environment)
            self._programs["worker"] = Program("worker", ["worker"], self.home, environment)
            self._say("waiting for the API")
            self._await_ready()
            self.api_key = self._find_or_make_key(database_url)
            self._tended = [Tended(part, self._say) for part in (*self._engines, *self._programs.values())]
        except BaseException:
            self.stop()
            raise

    def tend(self) -> None:
        """Start again what has ended by itself; to be called every second or so. Returns at once, and never gives up:
        a part that keeps ending is started ever more rarely."""
        for tended in self._tended:
            tended.look()
        for engine in self._engines:
            if isinstance(engine, Postgres) and engine.poll() is None:
                engine.ballast.make()

    def stop(self) -> None:
        """End everything in order: API and worker drain side by side, then the engines. A second Ctrl-C hurries it."""
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
        """(database URL, broker URL) of the engines: ours, or those that the environment names."""
        urls = []
        for variable, engine in (("DATABASE_URL", Postgres), ("BROKER_URL", Valkey)):
            if given := os.environ.get(variable):
                urls.append(given)
                continue
            self._say(f"starting {engine.__name__}")
            server = engine(self.home)
            urls.append(server.start())
            self._engines.append(server)
        return urls[0], urls[1]

    def _migrate(self, database_url: str) -> None:
        from api.store import migrate  # here: SQLAlchemy is for those who run the stack

        self._say("bringing the database to the newest schema")
        migrate.upgrade(database_url)

    def _settings(self, database_url: str, broker_url: str) -> dict[str, str]:
        roots = [str(Path(root).expanduser().resolve()) for root in self._model_roots]
        secret_key = self._find_or_make_secret_key()
        ours = {"BITFOUNDRY_SECRET_KEY_FILE": str(secret_key)} if secret_key else {}
        ours |= {"DATABASE_URL": database_url, "BROKER_URL": broker_url, "BITFOUNDRY_DATA_DIR": str(self.home)}
        return os.environ | {"BITFOUNDRY_MODEL_ROOTS": os.pathsep.join(roots)} | ours

    def _find_or_make_secret_key(self) -> Path | None:
        """The file of the key that seals secrets, None if the environment names one."""
        from api.store import vault  # here, as above

        if os.environ.get("BITFOUNDRY_SECRET_KEY") or os.environ.get("BITFOUNDRY_SECRET_KEY_FILE"):
            return None
        path = self.home / "secret.key"
        if not path.exists():
            vault.write_new_key(path)
        return path

    def _await_ready(self) -> None:
        limit = time.monotonic() + READY_LIMIT_S
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=5.0) as session:
            while time.monotonic() < limit:
                for program in self._programs.values():
                    if (status := program.poll()) is not None:
                        raise StackError(
                            f"{program.name} ended at once (status {status}):\n{tail(program.log)}",
                            hint=f"see {program.log}",
                        )
                with suppress(httpx2.TransportError):
                    if session.get("/healthz/ready").status_code == 200:
                        return
                time.sleep(0.1)
        raise StackError(f"the API was not ready after {READY_LIMIT_S:.0f} s", hint=f"see {self.logs / 'api.log'}")

    def _find_or_make_key(self, database_url: str) -> str:
        """The key of an earlier run if it may still do everything, else a new one."""
        from api.http.security import create_key  # here, as above

        known = Connection.read(self.home)
        key = known.api_key if known and self._accepts(known.api_key) else create_key(database_url, "local")
        Connection(url=self.url, api_key=key).write(self.home)
        return key

    def _accepts(self, key: str) -> bool:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=self.url, trust_env=False, headers=headers) as session:
            answer = session.get("/v1/keys/self")
        return answer.status_code == 200 and {"admin", "operator"} <= set(answer.json()["scopes"])


def _free_port(wanted: int) -> int:
    """`wanted`, or a free one for 0; StackError when another program listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise StackError(f"port {wanted}: {error.strerror}", hint="choose another with --port") from None
        return int(probe.getsockname()[1])
