"""Every client of PostgreSQL, the broker, the Hub, webhooks and an OpenID provider has a time limit, all in one place.

A call that makes a client, or asks without one, is listed with the place of its limit. The limits themselves are tested
on systems that accept connections and say nothing (tests/attack/test_c_dependencies.py).
"""

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.sources import MODULES, tree_of

CLIENTS = {
    "psycopg.connect", "Connection.connect", "create_engine", "create_async_engine", "redis.Redis",
    "redis.Redis.from_url", "Celery", "HfApi", "get_session", "snapshot_download", "hf_hub_download", "HfFileSystem",
    "load_dataset", "from_url", "urlopen", "urlretrieve", "create_connection", "open_connection", "httpx2.Client",
    "httpx2.AsyncClient", "httpx2.get", "httpx2.post", "httpx2.request", "httpx2.stream", "requests.get",
}  # fmt: skip
LIMITS = "quantcore.config.time_limits"
LIMITED = {
    "the limits are arguments of the call": {
        "api.store.engine": 1,
        "api.store.broker": 1,
        "api.webhooks.deliverer": 1,
        "api.oidc.provider": 1,
        "bitfoundry.local.postgres": 1,
        "bitfoundry.local.backup": 1,
        "bitfoundry.local.valkey": 1,
        "quantcore.hub.object_store": 1,
        "migrations.env": 1,
    },
    "a limit of the settings of Celery's transport": {"api.store.queue.wakeups": 1},
    "of a client that is made in quantcore.hub.session": {
        "quantcore.hub.session": 1,
        "quantcore.hub.repository": 2,
        "quantcore.hub.pull": 1,
        "quantcore.data.hub_dataset": 1,
    },
    "requests to our own service, whose caller chooses": {
        "bitfoundry.client.transport": 1,
        "bitfoundry.client.on_asyncio": 1,
    },
    "requests of a person's command, whose limit stands beside them": {"bitfoundry.client.mlflow": 1},
    "requests to our own service on this machine": {"bitfoundry.local.stack": 2, "bitfoundry.commands.options": 1},
}
WITHOUT_LIMITS = ("of a client", "requests to our own service, whose caller chooses", "requests of a person")


def client_calls(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if any(name == client or name.endswith(f".{client}") for client in CLIENTS):
                yield node


def test_every_client_is_known() -> None:
    known = Counter({module: number for places in LIMITED.values() for module, number in places.items()})
    found = {module: [ast.unparse(call) for call in client_calls(tree_of(path))] for module, path in MODULES.items()}
    assert {module: len(calls) for module, calls in found.items() if calls} == known, (
        "give a client its limits and a line here",
        {module: calls for module, calls in found.items() if len(calls) != known[module]},
    )


def test_the_limits_come_from_one_place() -> None:
    """Every module that makes a client imports them, unless it uses the client of another one."""
    for reason, modules in LIMITED.items():
        for module in () if reason.startswith(WITHOUT_LIMITS) else modules:
            imported = {node.module for node in ast.walk(tree_of(MODULES[module])) if isinstance(node, ast.ImportFrom)}
            takes_it = module == "api.store.broker"  # its two callers name the limit
            assert LIMITS in imported or takes_it, module
    numbers = [
        f"{module}: {ast.unparse(keyword)}"
        for module, path in MODULES.items()
        for call in client_calls(tree_of(path))
        for keyword in call.keywords
        if keyword.arg and "timeout" in keyword.arg and isinstance(keyword.value, ast.Constant)
    ]
    assert numbers == [], "a number belongs into quantcore/config/time_limits.py"


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("psycopg.connect('x')", 1),
        ("sqlalchemy.create_engine(url)", 1),
        ("redis.Redis(host='x')", 1),
        ("huggingface_hub.HfApi().whoami()", 1),
        ("with httpx2.Client(base_url='x') as c: c.get('/')", 1),
        ("urllib.request.urlopen('x')", 1),
        ("client.get('/')", 0),
    ],
)
def test_a_client_is_seen(code: str, number: int) -> None:
    """The tests above can fail."""
    assert len([*client_calls(ast.parse(code))]) == number
