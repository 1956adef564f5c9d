"""The container files, held to what can be known without a container engine: the compose file's shape, that what is
copied exists, that what is started starts, and that nothing runs with more rights than it needs."""

import json
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.settings import Settings
from bitfoundry.local.postgres import Postgres, find_binaries
from worker.engine import engine_environment

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = ("worker-cuda", "worker-rocm", "worker-cpu")
OURS = ("migrate", "api", *WORKERS)
DOCKERFILES = ("Dockerfile.cuda", "Dockerfile.rocm")
SERVICE_KEYS = {
    "build",
    "cap_add",
    "cap_drop",
    "command",
    "depends_on",
    "deploy",
    "devices",
    "env_file",
    "environment",
    "group_add",
    "healthcheck",
    "image",
    "init",
    "logging",
    "networks",
    "pids_limit",
    "ports",
    "profiles",
    "read_only",
    "restart",
    "security_opt",
    "shm_size",
    "stop_grace_period",
    "tmpfs",
    "user",
    "volumes",
}
DURATION = re.compile(r"(\d+(us|ms|s|m|h))+")
NEEDED = re.compile(r"\$\{[A-Z_]+:\?")


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) with continued lines joined and comments gone."""
    text = re.sub(r"^#.*\n", "", (ROOT / dockerfile).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120)


def all_texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in all_texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in all_texts(each)]
    return [str(value)]


def test_the_file_has_only_keys_that_compose_knows() -> None:
    known = {"name", "services", "networks", "volumes"}
    assert {key for key in COMPOSE if not key.startswith("x-")} == known
    for name, service in SERVICES.items():
        assert service.keys() <= SERVICE_KEYS, name
        assert "image" in service, name


def test_references_lead_somewhere() -> None:
    for name, service in SERVICES.items():
        for other, wanted in service.get("depends_on", {}).items():
            condition = wanted["condition"]
            assert other in SERVICES, name
            assert condition in {"service_healthy", "service_completed_successfully"}
            assert condition != "service_healthy" or "healthcheck" in SERVICES[other], (name, other)
        assert set(service["networks"]) <= COMPOSE["networks"].keys(), name
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{[^}]*\}", "/given", volume).split(":")[0]
            assert source.startswith("/") or source in COMPOSE["volumes"], (name, volume)


def test_every_server_has_a_health_check_and_time_to_stop() -> None:
    for name, service in SERVICES.items():
        if name == "migrate":
            assert re.fullmatch(r"on-failure:\d+", service["restart"]), "it ends when it is done, and tries again"
            continue
        check = service["healthcheck"]
        assert check["test"][0] in {"CMD", "CMD-SHELL"}, name
        assert all(DURATION.fullmatch(check[key]) for key in ("interval", "timeout")), name
        assert DURATION.fullmatch(service["stop_grace_period"]), name
        assert service["restart"] == "unless-stopped", name
    for worker in WORKERS:
        assert SERVICES[worker]["stop_grace_period"] == "180s"


def test_no_container_has_more_rights_than_it_needs() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert "privileged" not in service, name
        assert set(service.get("cap_add", [])) <= {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"}, name
        assert not service.get("cap_add") or name == "postgres"
        assert not any("docker.sock" in text for text in all_texts(service)), name
    models = [volume for name in OURS for volume in SERVICES[name].get("volumes", []) if "/models" in volume]
    assert len(models) == 1 + len(WORKERS)
    assert all(volume.endswith(":ro") for volume in models)


def test_databases_are_reachable_from_inside_alone() -> None:
    assert COMPOSE["networks"]["backend"]["internal"] is True
    for name in ("postgres", "redis"):
        assert SERVICES[name]["networks"] == ["backend"]
        assert "ports" not in SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["api"]["ports"])


def test_there_is_no_default_secret() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    uses = re.findall(r"\$\{([A-Z_]*(?:PASSWORD|SECRET|KEY|TOKEN)[A-Z_]*)(.*?)\}", text)
    needed = {"POSTGRES_PASSWORD", "VALKEY_PASSWORD", "BITFOUNDRY_SECRET_KEY"}
    assert {name for name, _ in uses} == needed | {"HF_TOKEN"}
    for name, rest in uses:
        assert rest.startswith(":?set ") if name in needed else rest == ":-", "demanded with a clear message, or none"
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|AUTH|_URL$", key):
                assert NEEDED.search(value), (name, key)


def test_images_are_pinned() -> None:
    images = [service["image"] for service in SERVICES.values()]
    for dockerfile in DOCKERFILES:
        images += [
            rest.split("=", 1)[1] for name, rest in instructions(dockerfile) if name == "ARG" and "_IMAGE=" in rest
        ]
    for image in images:
        tag = image.rpartition(":")[2]
        assert re.match(r"\d+\.\d+", tag), image


def test_our_images_come_from_stages_that_exist() -> None:
    for name in OURS:
        build = SERVICES[name]["build"]
        stages = [rest.split(" AS ")[1] for word, rest in instructions(build["dockerfile"]) if word == "FROM"]
        assert build["target"] in stages, name


def test_versions_agree() -> None:
    from bitfoundry import __version__

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in OURS:
        assert SERVICES[name]["image"].endswith(f":{__version__}"), name
    for dockerfile in DOCKERFILES:
        assert ("ARG", f"TORCH=torch=={pins['torch']}") in instructions(dockerfile)


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_is_copied_exists_in_the_repository(dockerfile: str) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = listed.stdout.splitlines()
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    stages = {rest.split(" AS ")[1] for word, rest in instructions(dockerfile) if word == "FROM"}
    for word, rest in instructions(dockerfile):
        if word != "COPY":
            continue
        *sources, _ = [part for part in rest.split() if not part.startswith("--")]
        if origin := re.search(r"--from=(\S+)", rest):
            assert origin[1] in stages
            continue
        for source in sources:
            assert any(path == source or path.startswith(f"{source}/") for path in tracked), source
            assert source in let_through or source.split("/")[0] in let_through, f".dockerignore keeps {source} out"


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_images_run_as_a_plain_user(dockerfile: str) -> None:
    users: dict[str, str] = {}
    stage, parent = "", ""
    for word, rest in instructions(dockerfile):
        if word == "FROM":
            parent, stage = rest.split(" AS ")
            users[stage] = users.get(parent, "root")
        elif word == "USER":
            users[stage] = rest
    for target in {
        SERVICES[name]["build"]["target"] for name in OURS if SERVICES[name]["build"]["dockerfile"] == dockerfile
    }:
        assert users[target] == "10001:10001", target


def commands() -> list[list[str]]:
    found = [SERVICES[name]["command"] for name in OURS if "command" in SERVICES[name]]
    for dockerfile in DOCKERFILES:
        found += [json.loads(rest) for word, rest in instructions(dockerfile) if word == "CMD"]
    return found


@cache
def help_of_the_api() -> str:
    return run_python("-m", "api", "serve", "--help").stdout


@cache
def start_of_a_worker() -> subprocess.CompletedProcess[str]:
    source = "import os; os.environ.update(DATABASE_URL='postgresql+psycopg://x@/x', BROKER_URL='memory://')"
    return run_python("-c", f"{source}; os.environ['BITFOUNDRY_DATA_DIR'] = '/tmp'; import worker.__main__")


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command[:3]))
def test_the_commands_start_here(command: list[str]) -> None:
    program, *arguments = command
    if program == "alembic":
        assert run_python("-m", "alembic", *arguments[:1], "--help").returncode == 0
        assert "script_location" in (ROOT / "alembic.ini").read_text()
    elif arguments[:3] == ["-m", "api", "serve"]:
        assert all(flag in help_of_the_api() for flag in arguments if flag.startswith("--"))
    else:
        assert command == ["python", "-m", "worker"]
        assert start_of_a_worker().returncode == 0, start_of_a_worker().stderr


def test_the_workers_health_check_asks_the_database(postgres_url: str) -> None:
    (check,) = {tuple(SERVICES[name]["healthcheck"]["test"]) for name in WORKERS}
    assert check[:3] == ("CMD", "python", "-c")

    def run(url: str) -> int:
        return subprocess.run(
            [sys.executable, "-c", check[3]], env={"DATABASE_URL": url}, capture_output=True
        ).returncode

    assert run(postgres_url) == 0
    assert run(postgres_url.partition("?")[0] + "?host=/nowhere") != 0


def test_the_apis_health_check_asks_whether_it_is_ready() -> None:
    """It is run against the real service in tests/e2e."""
    check = SERVICES["api"]["healthcheck"]["test"]
    assert check[:3] == ["CMD", "python", "-c"]
    assert "http://127.0.0.1:8000/healthz/ready" in check[3]
    served = next(
        json.loads(rest) for word, rest in instructions("Dockerfile.cuda") if '"api"' in rest and word == "CMD"
    )
    assert served[served.index("--port") + 1] == "8000"
    assert SERVICES["api"]["ports"][0].endswith(":8000")


def test_the_databases_health_check_waits_for_the_real_server(tmp_path: Path) -> None:
    """The image's entrypoint first starts a temporary server on a socket alone, to make the database, and ends it.

    Such a server is run here: by its socket it says that it is ready, and the health check must not ask that.
    """
    word, program, *arguments = SERVICES["postgres"]["healthcheck"]["test"]
    assert (word, program) == ("CMD", "pg_isready")
    isready = find_binaries() / program
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = Postgres(tmp_path)
    server.start()
    try:
        sockets = server.url.partition("?host=")[2]
        given = {"PATH": "/usr/bin:/bin", "PGPORT": port, "LC_ALL": "C"}  # nothing listens on this port, as on 5432
        by_socket = subprocess.run([isready, "--host", sockets, "--port", "5432"], env=given, capture_output=True)
        assert by_socket.returncode == 0, "the temporary server answers there"
        assert subprocess.run([isready, *arguments], env=given, capture_output=True).returncode == 2
    finally:
        server.stop()


def test_migrations_fail_while_the_database_is_away_so_that_they_are_tried_again(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``restart: on-failure`` needs a status other than 0, and one of 0 when the database answers."""
    program, *arguments = SERVICES["migrate"]["command"]
    monkeypatch.setenv("DATABASE_URL", postgres_url.partition("?")[0] + "?host=/nowhere")
    assert run_python("-m", program, *arguments).returncode == 1
    monkeypatch.setenv("DATABASE_URL", postgres_url)
    assert run_python("-m", program, *arguments).returncode == 0


def test_what_a_service_may_be_told_reaches_it() -> None:
    for name in ("api", *WORKERS):
        given = SERVICES[name]["environment"]
        for variable in ("BITFOUNDRY_PUBLISH_URLS", "HF_TOKEN", "OTEL_EXPORTER_OTLP_ENDPOINT"):
            assert given[variable] == f"${{{variable}:-}}", (name, variable)
        assert given["BITFOUNDRY_ENGINE_RANKS"] == "${BITFOUNDRY_ENGINE_RANKS:-1}"
    for name in WORKERS:
        assert SERVICES[name]["env_file"] == [{"path": "worker.env", "required": False}]
    settings = Settings(  # what is left out of .env is empty here
        database_url="x",
        broker_url="x",
        data_dir="/data",
        publish_urls="",
        engine_ranks="1",  # type: ignore[arg-type]
    )
    assert settings.publish_urls == () and settings.engine_ranks == 1


def test_a_worker_may_have_as_many_threads_as_a_large_machine_gives_its_ranks() -> None:
    cores, ranks = 256, 8
    for name in WORKERS:
        settings = Settings(
            database_url="x",
            broker_url="x",
            data_dir="/data",
            engine_threads=cores,
            engine_ranks=ranks,  # type: ignore[arg-type]
        )
        each = int(engine_environment(settings)["OMP_NUM_THREADS"])
        assert ranks * each == cores < SERVICES[name]["pids_limit"] / 8


def test_workers_have_what_jobs_may_ask_for() -> None:
    """Tasks need lm-evaluation-harness, traces OpenTelemetry."""
    for dockerfile in DOCKERFILES:
        assert "-r locks/worker.txt" in (ROOT / dockerfile).read_text()
    locked = (ROOT / "locks" / "worker.txt").read_text()
    assert "\nlm-eval==" in locked and "\nopentelemetry-sdk==" in locked


def test_the_worker_of_a_cpu_asks_for_no_gpu() -> None:
    worker = SERVICES["worker-cpu"]
    assert worker["profiles"] == ["cpu"] and not {"deploy", "devices", "group_add"} & worker.keys()
    text = (ROOT / "Dockerfile.cuda").read_text()
    stage = text[text.index("FROM base AS worker-cpu") :].partition("\nFROM ")[0]
    assert "NVIDIA" not in stage and 'CMD ["python", "-m", "worker"]' in stage


def test_the_engines_health_checks_are_their_own_tools() -> None:
    assert SERVICES["redis"]["healthcheck"]["test"][1].startswith("valkey-cli ping")
