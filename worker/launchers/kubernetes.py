"""Kubernetes as a launcher: a ``Job`` for each attempt, by the official client (``bitfoundry[kubernetes]``).

The operator's template is a manifest of a Job. It holds the image, devices, volumes, node selectors, tolerations and
the labels of a queue (Kueue). The engine is its first container, whose command is set here. A job for several nodes is
an Indexed Job with as many pods at once. Tried with a stand-in for the API server that runs pods as processes: no
cluster was available.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from api.settings import Settings
from quantcore.errors import ConfigError, reason_of
from worker.launchers import LAUNCHERS, End, LauncherAway, Request, Status

try:
    from kubernetes import client, config
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config.config_exception import ConfigException
    from urllib3.exceptions import HTTPError
except ModuleNotFoundError:  # who uses another launcher needs no client
    client = None

NAME, FOLDER = "bitfoundry.dev/job", "bitfoundry.dev/folder"
"""The label with a job's name, and the annotation with the folder of its launch."""
GRACE_S = 60
"""Seconds between SIGTERM and SIGKILL, unless the template says otherwise."""
KEPT_S = 24 * 3600
"""Seconds for which a Job that has ended is kept, unless the template says otherwise."""
TIMEOUT_S = 30
CONFLICT, NOT_FOUND = 409, 404
REFUSALS = {400, 403, 422}
WAITING = {"ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError", "CrashLoopBackOff"}
NOT_KEPT = (
    "PATH", "HOME", "USER", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR",
    "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables of the worker's machine that mean nothing in a pod. Its GPUs are those that the node gives it: a variable
in the manifest comes before that of the node's device plugin, and images for CUDA name all GPUs."""


@LAUNCHERS.add("kubernetes")
class Kubernetes:
    """The cluster of the usual configuration: that of the pod which this runs in, else ``KUBECONFIG``."""

    name = "kubernetes"

    def __init__(self, settings: Settings) -> None:
        """Read the template and the configuration. Raises ConfigError ``invalid_settings``."""
        if client is None:
            raise ConfigError(
                "The client of Kubernetes is not installed.",
                code="invalid_settings",
                hint="pip install 'bitfoundry[kubernetes]'",
            )
        self._template = read_template(settings.launcher_template)
        try:
            self._namespace = _load_config()
        except (ConfigException, OSError) as error:
            raise ConfigError(
                f"The configuration of Kubernetes cannot be read: {reason_of(error)}.",
                code="invalid_settings",
                hint="Run this worker in the cluster with a service account, or set KUBECONFIG.",
            ) from error
        self._namespace = self._template["metadata"].get("namespace") or self._namespace
        self._jobs, self._pods = client.BatchV1Api(), client.CoreV1Api()

    @staticmethod
    def preview(settings: Settings, request: Request) -> str:
        return str(yaml.safe_dump(manifest_of(read_template(settings.launcher_template), request), sort_keys=False))

    def submit(self, request: Request) -> str:
        manifest = manifest_of(self._template, request)
        try:
            _ask(self._jobs.create_namespaced_job, self._namespace, manifest)
        except ApiException as error:
            if error.status == CONFLICT:
                name = manifest["metadata"]["name"]
                if self.status(name).end is not None:
                    self.cancel(name)
                raise LauncherAway(f"the earlier Job '{name}' is being deleted") from error
            if error.status in REFUSALS:
                raise ConfigError(
                    f"Kubernetes refused the job: {_said(error)}",
                    code="launcher_refused",
                    hint="The operator can check the template (BITFOUNDRY_LAUNCHER_TEMPLATE), the rights of the service"
                    " account and the quotas of the namespace. Then retry the job.",
                ) from error
            raise LauncherAway(_said(error)) from error
        return str(manifest["metadata"]["name"])

    def find(self, name: str) -> dict[str, Path]:
        found = self._list(self._jobs.list_namespaced_job, f"{NAME}={name}")
        live = [job for job in found if job.metadata.deletion_timestamp is None and _condition(job) is None]
        return {job.metadata.name: Path(job.metadata.annotations[FOLDER]) for job in live}

    def status(self, allocation: str) -> Status:
        try:
            job = _ask(self._jobs.read_namespaced_job, allocation, self._namespace)
        except ApiException as error:
            if error.status == NOT_FOUND:
                return Status("Deleted", end=End.CANCELLED)
            raise LauncherAway(_said(error)) from error
        pods = self._list(self._pods.list_namespaced_pod, f"batch.kubernetes.io/job-name={allocation}")
        nodes = ",".join(sorted({pod.spec.node_name for pod in pods if pod.spec.node_name}))
        if job.metadata.deletion_timestamp is not None:
            return Status("Terminating", is_running=True, nodes=nodes)
        if (condition := _condition(job)) is not None:
            return Status(condition.type, end=_end_of(condition, pods), reason=condition.reason or "", nodes=nodes)
        if job.spec.suspend:
            return Status("Suspended", reason="waits for its queue")
        waits = [text for pod in pods if (text := _why_it_waits(pod))]
        is_running = not waits and len(pods) >= job.spec.parallelism
        return Status("Running" if is_running else "Pending", is_running, reason=waits[0] if waits else "", nodes=nodes)

    def cancel(self, allocation: str) -> None:
        try:
            _ask(self._jobs.delete_namespaced_job, allocation, self._namespace, propagation_policy="Foreground")
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise LauncherAway(_said(error)) from error

    def _list(self, ask: Any, selector: str) -> list[Any]:
        try:
            found: list[Any] = _ask(ask, self._namespace, label_selector=selector).items
        except ApiException as error:
            raise LauncherAway(_said(error)) from error
        return found


def read_template(file: Path | None) -> dict[str, Any]:
    """Return the manifest in a template. Raises ConfigError ``invalid_settings`` for one that is no Job."""
    if file is None:
        raise ConfigError(
            "A launcher for Kubernetes needs a manifest of a Job (BITFOUNDRY_LAUNCHER_TEMPLATE).",
            code="invalid_settings",
            hint="docs/how-to/kubernetes.md has one to begin with.",
        )
    try:
        manifest = yaml.safe_load(file.read_text())
        spec = manifest["spec"]["template"]["spec"]
        if manifest["kind"] != "Job" or not spec["containers"][0]["image"]:
            raise ValueError("it is no Job with an image")
    except (OSError, ValueError, KeyError, IndexError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"The template '{file}' (BITFOUNDRY_LAUNCHER_TEMPLATE) is no manifest of a Job: {reason_of(error)}.",
            code="invalid_settings",
            hint="docs/how-to/kubernetes.md has one to begin with.",
        ) from error
    manifest.setdefault("metadata", {})
    return dict(manifest)


def manifest_of(template: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Return the manifest of a request's Job.

    Each pod runs once: a failed engine is not started again here, except when its node took it away (preemption,
    drain, eviction), which counts as no failure.
    """
    manifest = copy.deepcopy(dict(template))
    metadata, spec = manifest["metadata"], manifest["spec"]
    metadata["name"] = name_of(request.name)
    metadata.pop("generateName", None)
    metadata["labels"] = {**metadata.get("labels", {}), NAME: request.name}
    metadata["annotations"] = {**metadata.get("annotations", {}), FOLDER: str(request.folder)}
    spec |= {
        "completions": request.nodes, "parallelism": request.nodes, "completionMode": "Indexed", "backoffLimit": 0,
        "podFailurePolicy": {"rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]},
    }  # fmt: skip
    spec.setdefault("ttlSecondsAfterFinished", KEPT_S)
    pod = spec["template"]["spec"]
    pod["restartPolicy"] = "Never"
    pod.setdefault("terminationGracePeriodSeconds", GRACE_S)
    pod.setdefault("automountServiceAccountToken", False)  # an engine needs no rights in the cluster
    container = pod["containers"][0]
    container["command"] = ["python", *request.argv[1:]]
    given = {variable["name"] for variable in container.get("env", ())}
    container["env"] = [
        *container.get("env", ()),
        *(
            {"name": name, "value": value}
            for name, value in sorted(request.environment.items())
            if name not in given and name not in NOT_KEPT
        ),
    ]
    memory = f"{-(-request.memory_bytes // 2**20)}Mi"
    resources = container.setdefault("resources", {})
    for kind in ("requests", "limits"):
        resources[kind] = {**resources.get(kind, {}), "memory": memory}
    resources["requests"].setdefault("cpu", str(request.cpus))
    return manifest


def name_of(name: str) -> str:
    """Return the name of a Job: lower case letters, digits and hyphens. One of a name is there at a time."""
    return name.replace("_", "-").lower()


def _load_config() -> str:
    """Load the configuration of the client; return the namespace."""
    namespace = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    try:
        config.load_incluster_config()
        return namespace.read_text().strip()
    except ConfigException:
        config.load_kube_config()
        _, context = config.list_kube_config_contexts()
        return str(context["context"].get("namespace") or "default")


def _ask(call: Any, *arguments: Any, **more: Any) -> Any:
    """Call the API server, with a time limit. Raises LauncherAway if it does not answer."""
    try:
        return call(*arguments, **more, _request_timeout=TIMEOUT_S)
    except (HTTPError, OSError) as error:
        raise LauncherAway(f"the API server does not answer ({reason_of(error)})") from error


def _condition(job: Any) -> Any:
    """Return the condition by which a Job has ended, None if it has not."""
    conditions = (job.status.conditions or ()) if job.status is not None else ()
    return next((each for each in conditions if each.type in ("Complete", "Failed") and each.status == "True"), None)


def _end_of(condition: Any, pods: list[Any]) -> End:
    if condition.type == "Failed" and condition.reason == "DeadlineExceeded":
        return End.OUT_OF_TIME
    ended = [status.state.terminated for pod in pods for status in pod.status.container_statuses or ()]
    if any(state is not None and state.reason == "OOMKilled" for state in ended):
        return End.OUT_OF_MEMORY
    is_lost = any(
        each.type == "DisruptionTarget" and each.status == "True"
        for pod in pods
        for each in pod.status.conditions or ()
    )
    return End.INTERRUPTED if is_lost and condition.type == "Failed" else End.EXITED


def _why_it_waits(pod: Any) -> str:
    """Return the reason why a pod does not run yet; "" for one that runs or has ended."""
    if pod.status.phase != "Pending":
        return ""
    for each in pod.status.conditions or ():
        if each.type == "PodScheduled" and each.status == "False":
            return f"{each.reason}: {each.message}" if each.message else str(each.reason)
    waiting = [status.state.waiting for status in pod.status.container_statuses or () if status.state.waiting]
    return next((f"{each.reason}: {each.message or ''}".rstrip(": ") for each in waiting if each.reason), "starting")


def _said(error: ApiException) -> str:
    """Return the message of the API server."""
    try:
        return str(yaml.safe_load(error.body)["message"])
    except (yaml.YAMLError, TypeError, KeyError):
        return f"{error.status} {error.reason}"
