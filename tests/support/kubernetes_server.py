"""A STAND-IN for the API server of Kubernetes and its nodes: Jobs and pods in memory, containers as processes here.

It validates manifests strictly against the published schemas (kubernetes-validate), and behaves as the documentation of
Jobs says as far as the launcher relies on it: names are unique, an Indexed Job has a pod for each index, a pod that
fails ends a Job without retries, one that a disruption ended is replaced if the failure policy ignores that, and a
deleted Job is there until its pods have ended.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

from tests.support.sources import ROOT

VERSION = "1.37"
JOBS = re.compile(r"/apis/batch/v1/namespaces/([^/]+)/jobs(?:/([^/]+))?")
PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods")


class Cluster:
    """Nodes for ``num_pods`` pods. ``refuse_with`` is a status that all requests get, such as 429 or 503.

    ``history``: what happened to pods and Jobs, in order.
    """

    def __init__(self, num_pods: int = 2) -> None:
        self.num_pods = num_pods
        self.refuse_with: int | None = None
        self.quota_is_used = False
        self.manifests: list[dict[str, Any]] = []
        self.history: list[str] = []
        self._jobs: dict[str, dict[str, Any]] = {}
        self._pods: dict[str, tuple[dict[str, Any], subprocess.Popen[bytes] | None]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)

    def jobs(self) -> list[str]:
        with self._lock:
            return sorted(name for name, job in self._jobs.items() if not job["status"].get("conditions"))

    def evict(self, name: str) -> None:
        """End the pods of a Job as a preemption or a drain of their node does."""
        with self._lock:
            for pod, process in self._pods.values():
                if _job_of(pod) == name and process is not None:
                    pod["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True"})
                    self.history.append(f"{pod['metadata']['name']} evicted")
                    process.kill()

    def kill_for_memory(self, name: str) -> None:
        with self._lock:
            for pod, process in self._pods.values():
                if _job_of(pod) == name and process is not None:
                    pod["status"]["reason"] = "OOMKilled"
                    process.kill()

    def end_in_time(self, name: str) -> None:
        """Let the Job's deadline pass."""
        with self._lock:
            self._end(self._jobs[name], "Failed", "DeadlineExceeded")
            for pod, process in self._pods.values():
                if _job_of(pod) == name and process is not None:
                    process.terminate()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        for _, process in self._pods.values():
            if process is not None:
                process.kill()
                process.wait()

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the object for a request."""
        if self.refuse_with is not None:
            return _failure(self.refuse_with, "the server is busy")
        with self._lock:
            if match := JOBS.fullmatch(path):
                return self._answer_job(method, match[1], match[2], query, body)
            if PODS.fullmatch(path) and method == "GET":
                pods = [pod for pod, _ in self._pods.values() if _is_selected(pod, query)]
                return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods}
        return _failure(404, f"no such path: {path}")

    def _answer_job(
        self, method: str, namespace: str, name: str | None, query: dict[str, list[str]], body: Any
    ) -> tuple[int, dict[str, Any]]:
        if method == "GET" and name is None:
            jobs = [job for job in self._jobs.values() if _is_selected(job, query)]
            return 200, {"kind": "JobList", "apiVersion": "batch/v1", "metadata": {}, "items": jobs}
        if method == "POST":
            return self._create(namespace, body)
        assert name is not None
        if name not in self._jobs:
            return _failure(404, f'jobs.batch "{name}" not found')
        job = self._jobs[name]
        if method == "DELETE":
            job["metadata"]["deletionTimestamp"] = _now()
            for pod, process in self._pods.values():
                if _job_of(pod) == name and process is not None:
                    process.terminate()
        return 200, job

    def _create(self, namespace: str, manifest: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return _failure(422, f"Job is invalid: {error}")
        name = manifest["metadata"]["name"]
        if not re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            return _failure(422, f"metadata.name: Invalid value: {name}")
        if self.quota_is_used:
            return _failure(403, "exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: 8, limited: 8")
        if name in self._jobs:
            return _failure(409, f'jobs.batch "{name}" already exists')
        self.manifests.append(manifest)
        spec = manifest["spec"]
        job = {**manifest, "status": {}, "spec": {"suspend": False, **spec}}
        job["metadata"] = {**manifest["metadata"], "namespace": namespace, "creationTimestamp": _now()}
        self._jobs[name] = job
        for index in range(spec["completions"]):
            self._add_pod(job, index)
        return 201, job

    def _add_pod(self, job: dict[str, Any], index: int) -> None:
        name = f"{job['metadata']['name']}-{index}-{next(self._numbers)}"
        labels = {
            "batch.kubernetes.io/job-name": job["metadata"]["name"],
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        scheduling = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
        pod = {
            "kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "labels": labels},
            "spec": dict(job["spec"]["template"]["spec"]), "status": {"phase": "Pending", "conditions": [scheduling]},
        }  # fmt: skip
        self._pods[name] = pod, None

    def _run(self) -> None:
        while not self._done.wait(0.05):
            with self._lock:
                self._do_round()

    def _do_round(self) -> None:
        for name, (pod, process) in list(self._pods.items()):
            job = self._jobs[_job_of(pod)]
            is_pending = process is None and pod["status"]["phase"] == "Pending"
            is_deleted = process is None and job["metadata"].get("deletionTimestamp")
            if is_deleted or (is_pending and job["status"].get("conditions")):
                del self._pods[name]
            elif is_pending:
                self._start_if_room(name, pod)
            elif process is not None and (status := process.poll()) is not None:
                self._pods[name] = pod, None
                self._note_end(name, pod, job, status)
        for name, job in list(self._jobs.items()):
            if job["metadata"].get("deletionTimestamp") and not any(
                _job_of(pod) == name for pod, _ in self._pods.values()
            ):
                del self._jobs[name]

    def _start_if_room(self, name: str, pod: dict[str, Any]) -> None:
        if sum(process is not None for _, process in self._pods.values()) >= self.num_pods:
            return
        container = pod["spec"]["containers"][0]
        environment = {variable["name"]: variable["value"] for variable in container.get("env", ())}
        index = pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
        environment |= {"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": index, "HOME": os.environ["HOME"]}
        command = [sys.executable if part == "python" else part for part in container["command"]]
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        pod["spec"]["nodeName"] = f"node-{index}"
        pod["status"] |= {"phase": "Running", "conditions": [{"type": "PodScheduled", "status": "True"}]}
        self._pods[name] = pod, process
        self.history.append(f"{name} started")

    def _note_end(self, name: str, pod: dict[str, Any], job: dict[str, Any], status: int) -> None:
        self.history.append(f"{name} ended with {status}")
        pod["status"]["phase"] = "Succeeded" if status == 0 else "Failed"
        reason = pod["status"].pop("reason", "Completed" if status == 0 else "Error")
        code = status if status >= 0 else 128 - status
        pod["status"]["containerStatuses"] = [
            {"name": "engine", "image": "x", "imageID": "x", "ready": False, "restartCount": 0,
             "state": {"terminated": {"exitCode": code, "reason": reason}}}
        ]  # fmt: skip
        if job["metadata"].get("deletionTimestamp"):
            del self._pods[name]
            return
        is_disrupted = any(each["type"] == "DisruptionTarget" for each in pod["status"]["conditions"])
        if status and is_disrupted and job["spec"]["completions"] == 1:
            del self._pods[name]
            self._add_pod(job, int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]))
        elif status and not job["status"].get("conditions"):
            self._end(job, "Failed", "BackoffLimitExceeded")
        elif not status and all(
            each["status"]["phase"] == "Succeeded" for each, _ in self._pods.values() if _job_of(each) == _job_of(pod)
        ):
            self._end(job, "Complete", "CompletionsReached")

    def _end(self, job: dict[str, Any], kind: str, reason: str) -> None:
        self.history.append(f"{job['metadata']['name']} {kind}: {reason}")
        job["status"]["conditions"] = [{"type": kind, "status": "True", "reason": reason}]


@contextmanager
def serving(folder: Path, cluster: Cluster) -> Iterator[Path]:
    """Serve the cluster's API; yield a KUBECONFIG for it."""
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cluster.start()
    config = folder / "kubeconfig.json"
    address = f"http://127.0.0.1:{server.server_port}"
    config.write_text(
        json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": address}}],
            "users": [{"name": "test", "user": {"token": "none"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "models"}}],
        })
    )  # fmt: skip
    try:
        yield config
    finally:
        cluster.stop()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster

    def log_message(self, *_: Any) -> None: ...

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        status, answer = self.cluster.answer(self.command, parts.path, parse_qs(parts.query), body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _answer


def _failure(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status}


def _job_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["batch.kubernetes.io/job-name"])


def _is_selected(thing: dict[str, Any], query: dict[str, list[str]]) -> bool:
    wanted = dict(part.split("=", 1) for text in query.get("labelSelector", ()) for part in text.split(",") if part)
    return wanted.items() <= thing["metadata"].get("labels", {}).items()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
