"""The Helm chart, held to what can be known without a cluster: the real helm renders each profile, every object is
validated against the published schemas, and what it says agrees with the code."""

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import bitfoundry
from api.__main__ import GRACEFUL_S
from api.http import health
from api.settings import Settings
from tests.support.helm import CHART, FOLDER, PROFILES, find, pods, render, run_helm, template
from tests.support.kubernetes_server import VERSION
from tests.support.sources import ROOT
from worker.engine import HUB_VARIABLES
from worker.launchers import Request
from worker.launchers.kubernetes import manifest_of, read_template
from worker.memory_watch import limit_of

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
PAGE = (ROOT / "docs" / "how-to" / "helm.md").read_text()
CUSTOM = {"ServiceMonitor"}
"""Kinds of other operators: no schema of theirs is here."""
OWNED = (
    "database_url", "broker_url", "data_dir", "model_roots", "secret_key", "stop_grace_s", "slots", "launcher",
    "launcher_template", "memory_bytes", "engine_threads", "engine_ranks", "node_address", "oidc_file",
    "oidc_client_secret", "show_local_runs",
)  # fmt: skip
"""Settings that the chart sets itself, and the one that is for a service on a person's own machine."""
SECRET_FILES = ("secret_key_file", "oidc_client_secret_file")
FOREIGN = {"HF_TOKEN", "REDISCLI_AUTH", "VALKEY_PASSWORD", "NVIDIA_VISIBLE_DEVICES"}
LIBPQ = {"PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSWORD", "PGSSLMODE", "PGSSLROOTCERT"}
STOP_MARGIN_S = 30
"""More than a worker needs to hand its jobs back once its engines have ended (8 s in test_faults_worker.py)."""


def variable(setting: str) -> str:
    return setting.upper() if setting in ("database_url", "broker_url") else f"BITFOUNDRY_{setting.upper()}"


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["spec"]["containers"]
    return dict(found)


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    """Return variable -> its value, or where it comes from."""
    given = container(pod).get("env", [])
    names = [each["name"] for each in given]
    assert len(set(names)) == len(names), "a variable is set twice"
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in given}


def settings_of(pod: dict[str, Any]) -> Settings:
    """Return the settings that a pod's variables give, without those that come from elsewhere."""
    names = {variable(name): name for name in Settings.model_fields}
    given = {names[each]: value for each, value in environment(pod).items() if each in names and isinstance(value, str)}
    return Settings(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_valid(profile: str) -> None:
    """Strictly: a field that the published schemas do not know fails."""
    done = run_helm("lint", "--strict", CHART, "-f", FOLDER / "profiles" / f"{profile}.yaml")
    assert done.returncode == 0, done.stdout
    objects = render(profile)
    for each in objects:
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, VERSION, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names) > 8
    assert all(len(name) <= 63 for _, name in names)
    assert not any(kind == "Secret" for kind, _ in names), "secrets are named, never made"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("replicas=3", "(root): Additional property replicas is not allowed"),
        ("api.replica=3", "api: Additional property replica is not allowed"),
        ('api.replicas="many"', "api.replicas: Invalid type. Expected: integer, given: string"),
        ("api.replicas=0", "api.replicas: Must be greater than or equal to 1"),
        ("image.tag=1", "image.tag: Invalid type. Expected: string, given: integer"),
        ('pools.tpu.device="tpu"', 'pools.tpu.device: pools.tpu.device must be one of the following: "cuda", "rocm"'),
        ('pools.tpu.device="cpu"', "pools.tpu: memoryGiB is required"),
        ("pools.cpu.gpu=1", "pools.cpu: Additional property gpu is not allowed"),
        ("settings.BITFOUNDRY_SLOTS=2", "settings: Additional property BITFOUNDRY_SLOTS is not allowed"),
        ('settings.BITFOUNDRY_POLL_S="soon"', "settings.BITFOUNDRY_POLL_S: Invalid type. Expected: number"),
        ('data.accessMode="ReadOnlyMany"', "data.accessMode must be one of the following"),
        ("networkPolicy.databasePort=70000", "networkPolicy.databasePort: Must be less than or equal to 65535"),
        ('image.registry=""', "image.registry: name the registry and folder of your images"),
        ('secret=""', "secret: name a Secret with secret-key"),
        ('database.secret=""', "database.secret: name a Secret with host, port, dbname"),
        ("ingress.enabled=true", "ingress.host: name the host of the service"),
        ("monitoring.serviceMonitor.enabled=true", "monitoring.serviceMonitor.secret: name a Secret with api-key"),
        ("pools.cpu.gpus=1", "pools.cpu.gpus: a pool of device cpu has none"),
        ('pools.cpu.device="cuda"', "pools.cpu.gpus: give the number of GPUs of each worker"),
        ("pools.cpu.slots=2", "pools.cpu: slots and jobLabels are for launcher kubernetes"),
    ],
)
def test_wrong_values_are_refused(value: str, message: str) -> None:
    done = template("small", value)
    assert done.returncode != 0 and message in done.stderr, done.stderr


def test_the_settings_that_values_may_give_are_those_of_the_code() -> None:
    """All but those that the chart sets, and the files of secrets that it gives in variables."""
    ours = {variable(name) for name in Settings.model_fields if name not in (*OWNED, *SECRET_FILES)}
    others = {"OTEL_EXPORTER_OTLP_ENDPOINT", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    assert others - {"OTEL_EXPORTER_OTLP_ENDPOINT"} < set(HUB_VARIABLES)
    assert SCHEMA["properties"]["settings"]["properties"].keys() == ours | others


@pytest.mark.parametrize("profile", PROFILES)
def test_every_variable_is_a_setting_and_no_needed_one_is_missing(profile: str) -> None:
    known = {variable(name) for name in Settings.model_fields} | FOREIGN | LIBPQ
    needed = {variable(name) for name in ("database_url", "broker_url", "data_dir", "model_roots", "secret_key")}
    engines = {variable(name) for name in ("stop_grace_s", "memory_bytes", "engine_threads", "engine_ranks")}
    for name, pod in pods(render(profile)):
        given = environment(pod)
        assert given.keys() <= known | SCHEMA["properties"]["settings"]["properties"].keys(), name
        assert pod["spec"]["enableServiceLinks"] is False, "a Service's variables would look like settings"
        if "-worker-" in name and not name.endswith(" engine"):
            assert given.keys() >= needed | engines, name
            launches = given.get("BITFOUNDRY_LAUNCHER") == "kubernetes"
            more = ("launcher_template", "slots") if launches else ("node_address",)
            assert given.keys() >= {variable(each) for each in more}, name
        elif name.endswith("-api"):
            assert given.keys() >= needed, name
        for secret in ("PGPASSWORD", "VALKEY_PASSWORD", "BITFOUNDRY_SECRET_KEY", "HF_TOKEN"):
            assert secret not in given or "secretKeyRef" in given[secret], "by reference only"


def test_the_settings_are_read_as_the_values_say() -> None:
    """Helm reads whole numbers as floats, and would write large ones as 1e+12."""
    objects = render(
        "small", "settings.BITFOUNDRY_MAX_DATASET_BYTES=1000000000000", "settings.BITFOUNDRY_POLL_S=2.5",
        "settings.BITFOUNDRY_CONFINE_ENGINE=false", "pools.cpu.replicas=0",
    )  # fmt: skip
    worker = find(objects, "Deployment", "worker-cpu")
    assert worker["spec"]["replicas"] == 0
    settings = settings_of(worker["spec"]["template"])
    assert (settings.max_dataset_bytes, settings.poll_s, settings.confine_engine) == (10**12, 2.5, False)
    assert settings.memory_bytes == 24 << 30 and settings.data_dir == Path("/data")


@pytest.mark.parametrize("stop_s", [30, 300])
def test_pods_have_the_time_that_a_drain_takes(stop_s: int) -> None:
    objects = render("kubernetes", f"stopGraceSeconds={stop_s}")
    for name, pod in pods(objects):
        if "-worker-" in name:
            if not name.endswith(" engine"):
                assert float(environment(pod)["BITFOUNDRY_STOP_GRACE_S"]) == stop_s
            assert pod["spec"]["terminationGracePeriodSeconds"] >= stop_s + STOP_MARGIN_S, name
    api = find(objects, "Deployment", "api")["spec"]["template"]["spec"]
    sleep_s = api["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert api["terminationGracePeriodSeconds"] >= sleep_s + 2 * GRACEFUL_S


@pytest.mark.parametrize(("profile", "pool", "memory_gib"), [("small", "cpu", 24), ("production", "h100", 900)])
def test_an_attempt_that_takes_too_much_is_ended_before_its_pod(profile: str, pool: str, memory_gib: int) -> None:
    """All its processes together; the worker's own limit comes before the kernel's."""
    worker = find(render(profile), "Deployment", f"worker-{pool}")["spec"]["template"]
    settings = settings_of(worker)
    most = limit_of(settings, settings.memory_bytes)
    assert memory_gib - 1 < most / 2**30 <= memory_gib
    sizes = container(worker)["resources"]
    assert {sizes[kind]["memory"] for kind in ("requests", "limits")} == {f"{memory_gib + 2}Gi"}


def test_probes_ask_what_is_there() -> None:
    objects = render("small")
    api = container(find(objects, "Deployment", "api")["spec"]["template"])
    asked = {kind: api[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    live, ready = (route.path for route in health.router.routes)  # type: ignore[attr-defined]
    assert asked == {"startupProbe": live, "livenessProbe": live, "readinessProbe": ready}
    assert api["ports"] == [{"name": "http", "containerPort": int(api["command"][-3])}]
    worker = container(find(objects, "Deployment", "worker-cpu")["spec"]["template"])
    assert ["CMD", *worker["readinessProbe"]["exec"]["command"]] == [
        text.strip() if index < 3 else text for index, text in enumerate(COMPOSE["worker-cpu"]["healthcheck"]["test"])
    ]
    assert "livenessProbe" not in worker, "a database that is away must not end engines"
    valkey = container(find(objects, "Deployment", "valkey")["spec"]["template"])
    assert valkey["livenessProbe"]["exec"]["command"][2] == COMPOSE["redis"]["healthcheck"]["test"][1]


@pytest.mark.parametrize("profile", PROFILES)
def test_no_pod_has_more_rights_than_it_needs(profile: str) -> None:
    objects = render(profile)
    for name, pod in pods(objects):
        spec = pod["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] == security["fsGroup"] == 10001, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert container(pod)["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert spec["shareProcessNamespace"] is COMPOSE["api"]["init"] is True, "somebody reaps what engines leave"
        launches = environment(pod).get("BITFOUNDRY_LAUNCHER") == "kubernetes"
        assert spec["automountServiceAccountToken"] is launches and ("serviceAccountName" in spec) is launches, name
        models = [each for each in container(pod)["volumeMounts"] if each["mountPath"] == "/models"]
        assert all(each["readOnly"] for each in models)
    roles = [each["rules"] for each in objects if each["kind"] == "Role"]
    (documented,) = (
        each["rules"]
        for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/how-to/kubernetes.md").read_text(), re.DOTALL)
        if (each := yaml.safe_load(block))["kind"] == "Role"
    )
    assert roles == ([documented] if profile == "kubernetes" else [])


@pytest.mark.parametrize("profile", PROFILES)
def test_what_names_another_object_finds_it(profile: str) -> None:
    objects = render(profile)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects)}

    def found(selector: dict[str, str]) -> list[str]:
        return [name for name, each in labels.items() if selector.items() <= each.items()]

    for each in objects:
        name = each["metadata"]["name"]
        if each["kind"] in ("Deployment", "PodDisruptionBudget"):
            assert found(each["spec"]["selector"]["matchLabels"]) == [name]
        elif each["kind"] == "Service":
            assert found(each["spec"]["selector"]) == [name]
            ports = container(dict(pods(objects))[name])["ports"]
            assert [port["targetPort"] for port in each["spec"]["ports"]] == [port["name"] for port in ports]
        elif each["kind"] == "ServiceMonitor":
            service = find(objects, "Service", "api")
            assert each["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            assert each["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
            assert each["spec"]["endpoints"][0]["path"] == "/metrics"
    budgets = {each["metadata"]["name"] for each in objects if each["kind"] == "PodDisruptionBudget"}
    assert budgets == {name for name in labels if re.search(r"-api$|-worker-\w+$", name)}
    claims = {each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"} | {"models"}
    for name, pod in pods(objects):
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        assert {each["name"] for each in container(pod)["volumeMounts"]} == volumes.keys(), name
        used = {each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if len(each) > 1 and
                "persistentVolumeClaim" in each}  # fmt: skip
        assert used <= claims


def reached(objects: tuple[dict[str, Any], ...], name: str) -> tuple[set[str], list[dict[str, Any]]]:
    """Return the pods that both sides' policies let a pod connect to, and its rules that name no pods of ours."""
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    labels = {each: pod["metadata"]["labels"] for each, pod in pods(objects)}

    def of(pod: str, way: str) -> list[dict[str, Any]]:
        mine = [p for p in policies if p["podSelector"]["matchLabels"].items() <= labels[pod].items()]
        assert any(way.capitalize() in each["policyTypes"] for each in mine), f"no policy for {way} of {pod}"
        return [rule for each in mine for rule in each.get(way, [])]

    def matches(peers: list[dict[str, Any]], pod: str) -> bool:
        return any(
            "namespaceSelector" not in peer and "podSelector" in peer
            and peer["podSelector"].get("matchLabels", {}).items() <= labels[pod].items()
            for peer in peers
        )  # fmt: skip

    rules = of(name, "egress")
    targets = {
        other
        for other in labels
        if any(matches(rule.get("to", []), other) for rule in rules)
        and any(matches(rule["from"], name) for rule in of(other, "ingress"))
    }
    return targets, [rule for rule in rules if not any(matches(rule.get("to", []), other) for other in labels)]


@pytest.mark.parametrize("profile", PROFILES)
def test_who_may_talk_to_whom(profile: str) -> None:
    objects = render(profile)
    names = [name for name, _ in pods(objects)]
    workers = {name for name in names if "-worker-" in name and not name.endswith(" engine")}
    for name in names:
        targets, others = reached(objects, name)
        ports = {port["port"] for rule in others for port in rule["ports"]}
        if name.endswith(" engine"):  # models of strangers: no database, no broker, no cluster
            assert (targets, ports) == ({name}, {53, 443})
            assert all(
                "except" in peer["ipBlock"] for rule in others for peer in rule["to"] if rule["ports"][0]["port"] == 443
            )
        elif name.endswith("-valkey"):
            assert (targets, ports) == (set(), set())
        elif name.endswith("-migrate"):
            assert (targets, ports) == (set(), {53, 5432})
        else:
            broker = "bitfoundry-valkey"
            assert targets == ({broker} | workers if name in workers else {broker}), name
            launches = environment(dict(pods(objects))[name]).get("BITFOUNDRY_LAUNCHER") == "kubernetes"
            assert ports - {4318} == {53, 443, 5432} | ({6443} if launches else set()), name


def test_the_launchers_template_makes_valid_jobs(tmp_path: Path) -> None:
    """With what the launcher adds; and an engine finds the files of its job where the worker has written them."""
    objects = render("kubernetes")
    file = tmp_path / "job.yaml"
    file.write_text(find(objects, "ConfigMap", "worker-h100")["data"]["job.yaml"])
    request = Request("bitfoundry-x", Path("/data/work/x"), ("python", "-m", "x"), 2, 1 << 30, 64, {"A": "b"})
    manifest = manifest_of(read_template(file), request)
    kubernetes_validate.validate(manifest, VERSION, strict=True)
    worker = find(objects, "Deployment", "worker-h100")["spec"]["template"]
    engine = manifest["spec"]["template"]
    shared = [
        {
            each["mountPath"]: each["name"]
            for each in container(pod)["volumeMounts"]
            if each["name"] in ("data", "models")
        }
        for pod in (worker, engine)
    ]
    assert shared[0] == shared[1] == {"/data": "data", "/models": "models"}
    assert container(engine)["image"] == container(worker)["image"]
    assert container(engine)["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "1024Mi"}
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert environment(worker)["BITFOUNDRY_LAUNCHER_TEMPLATE"] == "/etc/bitfoundry/launcher/job.yaml"
    without = render("kubernetes", 'pools.h100.device="cpu"', "pools.h100.gpus=0")
    file.write_text(find(without, "ConfigMap", "worker-h100")["data"]["job.yaml"])
    kubernetes_validate.validate(manifest_of(read_template(file), request), VERSION, strict=True)


def test_migrations_come_before_the_processes_that_need_them() -> None:
    job = find(render("small"), "Job", "migrate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert container(job["spec"]["template"])["command"] == COMPOSE["migrate"]["command"]
    needed = json.dumps(job["spec"])
    assert "serviceAccount" not in needed.replace("automountServiceAccountToken", "")
    assert "configMap" not in needed and "persistentVolumeClaim" not in needed, "nothing of the chart is there yet"


def test_images_and_versions_are_those_of_the_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == bitfoundry.__version__
    assert set(re.findall(r"bitfoundry-[\w-]+:([\d.]+)", PAGE)) == {bitfoundry.__version__}
    ours = {COMPOSE[name]["image"] for name in COMPOSE if "build" in COMPOSE[name]}
    for profile in PROFILES:
        for _, pod in pods(render(profile)):
            image = container(pod)["image"]
            assert image == COMPOSE["redis"]["image"] or image.removeprefix("registry.example.org/models/") in ours
    commands = {name: COMPOSE[name]["command"] for name in ("api", "redis")}
    objects = render("small")
    api = container(find(objects, "Deployment", "api")["spec"]["template"])["command"]
    assert api[:-1] == commands["api"][:-1]
    valkey = container(find(objects, "Deployment", "valkey")["spec"]["template"])["command"]
    assert valkey[:-1] == commands["redis"][:-1]


def test_the_page_shows_every_profile_and_every_field_of_a_pool() -> None:
    assert all(f"profiles/{profile}.yaml" in PAGE for profile in PROFILES)
    listed = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    fields = {field for cell in listed for field in re.findall(r"`(\w+)`", cell)}
    assert SCHEMA["definitions"]["pool"]["properties"].keys() <= fields


def test_the_tests_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert named and named <= there


def test_sign_in_through_a_provider_is_only_for_the_api() -> None:
    for name, pod in pods(render("production")):
        is_api = name.endswith("-api")
        assert ("BITFOUNDRY_OIDC_FILE" in environment(pod)) == is_api, name
        if is_api:
            [volume] = [each for each in pod["spec"]["volumes"] if each["name"] == "oidc"]
            [mount] = [each for each in container(pod)["volumeMounts"] if each["name"] == "oidc"]
            path = environment(pod)["BITFOUNDRY_OIDC_FILE"]
            assert path == f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}" and mount["readOnly"]
    assert not [name for name, pod in pods(render("small")) if "BITFOUNDRY_OIDC_FILE" in environment(pod)]
