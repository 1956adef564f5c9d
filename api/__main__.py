"""``python -m api serve``: the API in the foreground. ``python -m api create-key NAME``: a key, made on the machine.
``python -m api fsck``: are the stored files those that the rows name?

Every route but the probes wants a key, always. Beyond this machine the API listens only once there is one: a service
that nobody can enter has not been set up, and must not wait in the open for whoever comes first.
"""

from __future__ import annotations

import argparse
import gc
import ipaddress
import multiprocessing
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
import uvicorn.config
from fastapi import FastAPI

from api import json_log, tracing
from api.http import descriptors
from api.http.connection_limits import BoundedProtocol
from api.http.security import SCOPES, create_key
from api.integrity import fsck
from api.main import create_app
from api.settings import Settings, read_settings
from api.store.accounts import keys
from api.store.engine import connect, dispose
from quantcore.errors import ConfigError
from quantcore.sandbox.parent_death import end_with_parent

SERVER: dict[str, Any] = {
    "http": BoundedProtocol,
    "timeout_keep_alive": 75,  # longer than proxies and clients keep one: else it closes as they send a request
    "access_log": False,
}
HUNG_S = 10  # a process that does not answer its parent for this long is replaced
GRACEFUL_S = 5  # open event streams end then; their clients reconnect and continue where they were


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0 done, 1 a failure (explained), 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m api", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="listen for requests")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument(
        "--processes", type=_positive, default=1, help="processes that share the port, one per core to use (default: 1)"
    )
    create = commands.add_parser("create-key", help="print a new API key of the project 'default', once")
    create.add_argument("name")
    create.add_argument("--scope", action="append", choices=SCOPES, help="repeatable (default: all)")
    check = commands.add_parser("fsck", help="check all stored files against the database and their hashes")
    check.add_argument(
        "--repair",
        action="store_true",
        help="remove files that are older than a day and not referenced by the database",
    )
    check.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        settings = read_settings()
        if options.command == "create-key":
            print(create_key(settings.database_url.get_secret_value(), options.name, options.scope or SCOPES))
        elif options.command == "fsck":
            return fsck.run(settings, repair=options.repair, as_json=options.json)
        else:
            check_exposure(options.host, settings)
            _ = settings.vault, settings.oidc  # as create_app does: bad ones fail before any process is started
            json_log.configure(settings.log_format)
            descriptors.check()
            uvicorn.run(
                "api.__main__:make_app" if options.processes > 1 else make_app(settings),
                factory=options.processes > 1,
                workers=options.processes,
                timeout_worker_healthcheck=HUNG_S,
                host=options.host,
                port=options.port,
                log_config=None if settings.log_format == "json" else uvicorn.config.LOGGING_CONFIG,
                timeout_graceful_shutdown=GRACEFUL_S,
                **SERVER,
            )
    except ConfigError as error:
        print(f"{error} ({error.code})", file=sys.stderr)
        return 1
    return 0


def make_app(settings: Settings | None = None) -> FastAPI:
    """Make the app of one process. Without ``settings`` it is one of several processes, and ends with their parent."""
    if settings is None:
        end_with_parent()
        if (parent := multiprocessing.parent_process()) and not parent.is_alive():
            raise SystemExit(1)  # the parent ended before the kernel was asked to watch it
        settings = read_settings()
        json_log.configure(settings.log_format)
    tracing.configure(settings, "bitfoundry-api")
    app = create_app(settings)
    gc.collect()
    gc.freeze()  # objects that live as long as the process need not be scanned again while requests wait
    return app


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of processes (1 or more)")
    return int(text)


def check_exposure(host: str, settings: Settings) -> None:
    """Check that there is a valid key if others could reach ``host``. Raises ConfigError ``no_api_key``."""
    if is_loopback(host):
        return
    sessions = connect(settings.database_url.get_secret_value(), pool_size=1)
    try:
        with sessions.begin() as session:
            ready = keys.is_any_valid(session)
    finally:
        dispose(sessions)
    if not ready:
        raise ConfigError(
            f"The API does not listen on {host} until a valid API key exists.",
            code="no_api_key",
            hint="Create one with `python -m api create-key NAME`, or listen on 127.0.0.1.",
        )


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach ``host``. A name other than localhost may lead anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main())
