"""The real engines for the tests: one PostgreSQL and one Valkey a session, a fresh database a test module."""

import gc
import os
import secrets
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import settings

from bitfoundry.local.stack import Postgres, Valkey
from quantcore.sandbox import fork_server
from tests.support.proof_server import ProofServer

pytest_plugins = ("tests.consumers.table",)

TEMPLATE = "bitfoundry_template"

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["BITFOUNDRY_ORIGINALS_DIR"] = ""  # no test depends on what another one has measured
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="bitfoundry-data-")  # no test writes into the user's own
os.environ["TRITON_INTERPRET"] = "1"  # read once, when Triton is imported: with torch, where that finds it

settings.register_profile("any machine", deadline=None)  # by default an example must take less than 0.2 s
settings.load_profile("any machine")
gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """Exempt modules and test items from garbage collection, and collect less often: it took a fifth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def each_text_is_tokenized_once() -> Iterator[None]:
    """By a small tokenizer: of a tiny job the built-in text would be half the time."""
    if "transformers" not in sys.modules:  # no test of those that were collected has an engine
        yield
        return
    from transformers import PreTrainedTokenizerBase

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "__call__", _remembering(PreTrainedTokenizerBase.__call__))
        yield


@pytest.fixture(scope="session", autouse=True)
def proofs_import_once() -> Iterator[None]:
    """A new interpreter for each proof would import for five seconds."""
    server = ProofServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_standby", server)
        yield
        server.end()


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Triton's interpreter, for kernels on the CPU.

    `make setup` puts Triton beside the environment: torch loads it if it can, into every process, where it takes 80 MB.
    """
    sys.path.append(str(Path(sys.prefix) / "share" / "triton"))


@pytest.fixture(scope="session", autouse=True)
def authorities_are_read_once() -> Iterator[None]:
    """Hundreds of APIs and clients start here, and each would read the system's certificates for 30 ms."""
    create, known = ssl.create_default_context, {}

    def create_default_context(*given: Any, **named: Any) -> ssl.SSLContext:
        places = tuple(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
        key = (given, tuple(named.items()), places)
        if key not in known:
            known[key] = create(*given, **named)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create_default_context)
        yield


def _remembering(call: Callable[..., Any]) -> Callable[..., Any]:
    """The key is all that the tokenizer is, and the text; calls that ask for anything else go through."""
    known: dict[tuple[str, str], tuple[int, ...]] = {}

    def tokenize(self: Any, *texts: Any, **given: Any) -> Any:
        plain = given == {"add_special_tokens": False, "verbose": False} and self.is_fast and self.vocab_size < 5000
        if not plain or len(texts) != 1 or not isinstance(texts[0], str):
            return call(self, *texts, **given)
        key = (self.backend_tokenizer.to_str(), texts[0])
        if key not in known:
            known[key] = tuple(call(self, *texts, **given)["input_ids"])
        return {"input_ids": list(known[key])}

    return tokenize


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running server without fsync; its data goes with the session. `url_of(name)` names its databases."""
    with tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as home:
        server = Postgres(Path(home), durable=False)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def _migrated(postgres: Postgres) -> str:
    """The name of a database with the newest schema and no rows, to copy from."""
    from api.store import migrate

    _execute(postgres, f"CREATE DATABASE {TEMPLATE}")
    migrate.upgrade(postgres.url_of(TEMPLATE))
    return TEMPLATE


@pytest.fixture(scope="module")
def postgres_url(postgres: Postgres, _migrated: str) -> Iterator[str]:
    """SQLAlchemy's URL of a database of this test module's own, migrated and empty."""
    name = f"test_{secrets.token_hex(6)}"
    _execute(postgres, f"CREATE DATABASE {name} TEMPLATE {_migrated}")
    yield postgres.url_of(name)
    _execute(postgres, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def _valkey() -> Iterator[Valkey]:
    with tempfile.TemporaryDirectory(prefix="bf-test-", dir="/tmp") as home:
        server = Valkey(Path(home))
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="module")
def broker_url(_valkey: Valkey) -> str:
    """Celery's broker URL, emptied for this test module."""
    _valkey.flush()
    return _valkey.url


def _execute(server: Postgres, statement: str) -> None:
    url = server.url_of("postgres").replace("+psycopg", "", 1)
    with psycopg.connect(url, autocommit=True) as session:
        session.execute(statement)
