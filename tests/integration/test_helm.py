"""What the Helm chart says, tried on the real service: its variables on a PostgreSQL that wants a password, and the
queries of its dashboard on the metrics."""

import json
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fastapi.testclient import TestClient

from api.store.queue import measures
from api.store.queue.measures import Measures
from bitfoundry.local.postgres import Postgres
from tests.support.helm import CHART, find, render
from tests.support.sources import ROOT

PASSWORD = "p@ss/w:rd ?#%41"
DASHBOARD = json.loads((CHART / "dashboards" / "bitfoundry.json").read_text())


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Secret as CloudNativePG makes it, of a database over TCP that wants the password."""
    server = Postgres(tmp_path)
    server.start()
    try:
        with psycopg.connect(server.url_of("postgres").replace("+psycopg", "", 1), autocommit=True) as session:
            session.execute(f"CREATE ROLE app LOGIN PASSWORD '{PASSWORD}'")
            session.execute("CREATE DATABASE app OWNER app")
            rules = server.data / "pg_hba.conf"
            rules.write_text(f"local app app scram-sha-256\n{rules.read_text()}")
            session.execute("SELECT pg_reload_conf()")
        relay = make_relay(server.url.partition("?host=")[2])
        port = str(relay.server_address[1])
        yield {"host": "127.0.0.1", "port": port, "dbname": "app", "username": "app", "password": PASSWORD}
        relay.shutdown()
        relay.server_close()
    finally:
        server.stop()


def make_relay(sockets: str) -> socketserver.ThreadingTCPServer:
    """Pass connections to a free port on to PostgreSQL's socket, which takes no others."""

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as upstream:
                upstream.connect(f"{sockets}/.s.PGSQL.5432")
                back = threading.Thread(target=pump, args=(upstream, self.request), daemon=True)
                back.start()
                pump(self.request, upstream)
                back.join()

    def pump(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def start(container: dict[str, Any], command: list[str], secret: dict[str, str]) -> int:
    """Run a command with the variables of a container, filled in as a node fills them in. Returns its exit status."""
    given: dict[str, str] = {"PATH": "/usr/bin:/bin"}
    for each in container["env"]:
        if "value" in each:
            given[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: given[match[1]], each["value"])
        elif each["valueFrom"].get("secretKeyRef", {}).get("name") == "bitfoundry-postgres":
            given[each["name"]] = secret[each["valueFrom"]["secretKeyRef"]["key"]]
        else:
            given[each["name"]] = "of another Secret"
    program, *arguments = command
    argv = [sys.executable, *(["-m", program] if program != "python" else []), *arguments]
    return subprocess.run(argv, cwd=ROOT, env=given, capture_output=True).returncode


def test_the_migrations_and_the_probe_reach_the_database(secret: dict[str, str]) -> None:
    objects = render("small")
    (migrate,) = find(objects, "Job", "migrate")["spec"]["template"]["spec"]["containers"]
    (worker,) = find(objects, "Deployment", "worker-cpu")["spec"]["template"]["spec"]["containers"]
    probe = worker["readinessProbe"]["exec"]["command"]
    assert start(worker, probe, secret) != 0, "there is no schema yet"
    assert start(migrate, migrate["command"], secret) == 0
    assert start(worker, probe, secret) == 0
    wrong = secret | {"password": "another"}
    assert start(migrate, migrate["command"], wrong) != 0 and start(worker, probe, wrong) != 0


def test_the_dashboard_asks_for_metrics_that_there_are(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names and labels; and of copies that all replicas return it takes the maximum, never the sum."""
    gpu = {("w", "0", "H100"): {"total": 2, "used": 1}}
    full = Measures(
        {"queued": 1}, 1, 1, 1, 1, 1, 1, {"ready": 1}, 1, {"quantize": (1, 1)}, {"good": 1}, {"orphan": 1}, gpu
    )
    monkeypatch.setattr(measures, "measure", lambda session: full)
    there: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(bitfoundry_\w+)(?:\{(.*)\})? \S+$", client.get("/metrics").text, re.MULTILINE):
        there[name] = set(re.findall(r'(\w+)="', labels))
    used = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            parts = re.findall(
                r'max(?: by \(([\w, ]+)\) )?\((bitfoundry_\w+)\{job="\$job"(?:, (\w+)="\w+")?\}\)', target["expr"]
            )
            assert target["expr"].count("bitfoundry_") == len(parts) > 0, target
            for by, name, label in parts:
                kept = set(by.split(", ")) if by else set()
                assert kept | ({label} if label else set()) == there[name], (panel["title"], name)
                assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]
                used.add(name)
    assert used == there.keys(), "a metric that nobody sees"
    assert DASHBOARD["templating"]["list"][1]["query"] == "label_values(bitfoundry_jobs, job)"
