"""The service from Python: typed, synchronous, and light (no torch, no web framework).

client = Client()  # the service that `bitfoundry up` runs here; or Client("http://127.0.0.1:8765", api_key)
job = client.submit("/models/SmolLM2-135M", config="w4a16", export=["compressed_tensors"])
job = client.wait(job.id)
client.download(job.id, Path("smollm2-w4a16"))
"""

import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack
from urllib.parse import quote, urlencode

import httpx2

from bitfoundry.client.account import Account
from bitfoundry.client.answers import ArtifactFile, Event, Inspection, Job, LogLine, Plan, Summary
from bitfoundry.client.bodies import JobOptions, given, job_body, model_of
from bitfoundry.client.chats import Chats
from bitfoundry.client.connection import Connection
from bitfoundry.client.datasets import Datasets
from bitfoundry.client.download import download, download_tar
from bitfoundry.client.filters import JobFilter, query_of
from bitfoundry.client.follow import follow
from bitfoundry.client.model_answers import BriefSweep, ModelFolders, ModelResults, ResultChange, Sweep, UsedModel
from bitfoundry.client.named import the_one
from bitfoundry.client.registry import Registry
from bitfoundry.client.retention import Retention
from bitfoundry.client.shares import Shares
from bitfoundry.client.transport import Transport
from bitfoundry.client.webhooks import Webhooks
from bitfoundry.errors import WaitTimeout

JOB_ID = re.compile(r"job_[0-9a-f]{32}")


class Client:
    """A connection to the service. Safe to use from several threads; close it or use it as a context manager.

    Every method raises ApiError, whose `code` is the service's stable code.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        home: Path | None = None,
        timeout_s: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """Connect to a service; without an address and a key to the one that the commands find (`Connection.find`)."""
        connection = Connection.find(base_url, api_key, home)
        self._attach(Transport(connection.url, connection.api_key, timeout_s=timeout_s, transport=transport))

    @classmethod
    def over(cls, service: Transport) -> "Client":
        """Return a client that sends the same calls over another transport."""
        client = cls.__new__(cls)
        client._attach(service)
        return client

    def _attach(self, service: Transport) -> None:
        self._service = service
        self.account = Account(service)
        self.chats = Chats(service)
        self.registry = Registry(service)
        self.retention = Retention(service)
        self.shares = Shares(service)
        self.webhooks = Webhooks(service)

    def submit(
        self,
        model: str | Path | Mapping[str, Any],
        *,
        config: str | Mapping[str, Any] | None = None,
        mix: Mapping[str, Any] | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        priority: int | None = None,
        limits: Mapping[str, int] | None = None,
        publish: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Queue a job. A bad job is refused before it is queued.

        `model` is a path on the server, a Hub id `org/name`, or the request's own object. `config` is a preset's name,
        {"preset": "w4a16", "algo_config": [{"name": "gptq"}]}, or a whole config; or `mix` {schemes: ["w4a16",
        "int8_weight_only"], max_bits: 5} chooses the scheme of each layer for `max_bits`, `max_size` or
        `max_divergence`. For `options` see JobOptions.

        `priority` is 0 to 9, 9 goes first; `limits` {max_runtime_s, max_pending_s}; `publish` says where the artifact
        goes, as the method of that name does. The request is sent again when no answer comes, and still makes one job:
        with `idempotency_key` also when this program is run again.
        """
        body = job_body(model, config, mix, options)
        body |= given(name=name, labels=labels, priority=priority, limits=limits, publish=publish)
        return self._job("POST", "/v1/jobs", body=body, key=idempotency_key or str(uuid.uuid4()))

    def plan(
        self,
        model: str | Path | Mapping[str, Any],
        *,
        config: str | Mapping[str, Any] | None = None,
        mix: Mapping[str, Any] | None = None,
        hardware: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Plan:
        """Plan a job, layer by layer, without running it.

        With `hardware`, {devices: "8x80GB", nodes, host_memory, disk}, the plan's `capacity` says whether the job fits
        there, and how long it would take.
        """
        body = job_body(model, config, mix, options) | given(hardware=hardware)
        return Plan.model_validate_json(self._service.send("POST", "/v1/plans", body=body, repeat=True).content)

    def get(self, job_id: str) -> Job:
        """Return a job. Raises ApiError `job_not_found`."""
        return self._job("GET", _path(job_id))

    def find(self, job: str) -> Job:
        """Return the job with this id, the only one whose id starts so or that has this name, or the `last` one.

        A version of the model registry, such as `support-bot@production`, is the job whose result it is. Raises
        BitfoundryError `job_not_found` or `job_not_unique`, which names the candidates.
        """
        if JOB_ID.fullmatch(job):
            return self.get(job)
        if version := self.registry.find_version(job):
            return self.get(version.job_id)
        if job == "last":
            found = [*islice(self.list(page_size=1), 1)]
        else:
            start = job.removeprefix("job_")
            listed = self.list(text=job) if job else iter(())
            found = [each for each in listed if each.name == job or each.id.removeprefix("job_").startswith(start)]
        return the_one(found, job, "job")

    def list(self, *, page_size: int = 50, **wanted: Unpack[JobFilter]) -> Iterator[Job]:
        """Yield the jobs that fit the filter, newest first, loaded page by page."""
        for page in self._pages("/v1/jobs", query_of(wanted) | {"limit": page_size}):
            yield from (Job.model_validate(each) for each in page["data"])

    def summary(self, **wanted: Unpack[JobFilter]) -> Summary:
        """Return the number of jobs in each state, among those that `list` would yield."""
        answer = self._service.send("GET", "/v1/jobs/summary", query=query_of(wanted))
        return Summary.model_validate_json(answer.content)

    def edit(self, job_id: str, changes: Mapping[str, Any], *, etag: str = "*") -> Job:
        """Change the `name`, the `labels` (all of them), the `priority` or `pinned` of a job.

        With the `etag` of an earlier answer, raises ApiError `job_changed` if the job has changed since.
        """
        return self._job("PATCH", _path(job_id), body=changes, headers={"If-Match": etag})

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended, and its files. Raises ApiError `wrong_state` for one that has not."""
        self._service.send("DELETE", _path(job_id))

    def clone(
        self, job_id: str, changes: Mapping[str, Any] | None = None, *, idempotency_key: str | None = None
    ) -> Job:
        """Queue a copy of a job with `changes`, which are fields of the request."""
        key = idempotency_key or str(uuid.uuid4())
        return self._job("POST", f"{_path(job_id)}/clone", body=changes or {}, key=key)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job. Raises ApiError `job_already_final` for one that has ended."""
        return self._job("POST", f"{_path(job_id)}/cancel")

    def pause(self, job_id: str) -> Job:
        """Pause a job. A running job is stopped, and continues after its last saved block when it is resumed."""
        return self._job("POST", f"{_path(job_id)}/pause")

    def resume(self, job_id: str) -> Job:
        """Queue a paused job again. Raises ApiError `wrong_state` for a job in another state."""
        return self._job("POST", f"{_path(job_id)}/resume")

    def retry(self, job_id: str, *, elsewhere: bool = False) -> Job:
        """Queue a failed or cancelled job again. Raises ApiError `wrong_state` for a job in another state.

        `elsewhere`: no worker on the host of its last attempt takes it.
        """
        return self._job("POST", f"{_path(job_id)}/retry{'?elsewhere=true' if elsewhere else ''}")

    def publish(self, job_id: str, target: Mapping[str, Any] | None = None) -> Job:
        """Publish the artifact of a succeeded job. It is safe to repeat; `wait_published` waits for the end.

        `target` is {"repo_id": "org/name", "hub_token": name}, with `private`, `revision`, `create_pr`,
        `commit_message` and `path_in_repo` if needed, or {"to": URL}. Without a target, the last publication, which has
        failed, is tried again.
        """
        return self._job("POST", f"{_path(job_id)}/publish", body=target)

    def plan_publication(self, job_id: str, target: Mapping[str, Any]) -> dict[str, Any]:
        """Check a publication without publishing; return what `publish` would send, and where."""
        query = {"dry_run": "true"}
        return dict(self._service.send("POST", f"{_path(job_id)}/publish", query=query, body=target).json())

    def wait_published(
        self, job_id: str, *, timeout_s: float | None = None, on_change: Callable[[Job], None] | None = None
    ) -> Job:
        """Wait until the publication has succeeded or failed; `Job.publication` says which. Raises WaitTimeout."""
        return self._poll(
            job_id,
            lambda job: job.publication is None or job.publication.is_final,
            lambda job: job.publication.state if job.publication else "unpublished",
            timeout_s=timeout_s,
            on_change=on_change,
        )

    def submit_sweep(
        self,
        job: Mapping[str, Any],
        matrix: Mapping[str, Sequence[Any]],
        *,
        name: str | None = None,
        idempotency_key: str | None = None,
    ) -> Sweep:
        """Queue a job for every combination of the values in `matrix`: either all of them or none.

        `job` is the body of a request for a job, and `matrix` maps JSON pointers into it to lists of values.
        """
        body = {"job": job, "matrix": matrix} | ({"name": name} if name is not None else {})
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        answer = self._service.send("POST", "/v1/sweeps", body=body, headers=headers, repeat=True)
        return Sweep.model_validate_json(answer.content)

    def sweeps(self, *, page_size: int = 50) -> Iterator[BriefSweep]:
        """Yield the project's sweeps in short, newest first, loaded page by page."""
        for page in self._pages("/v1/sweeps", {"limit": page_size}):
            yield from (BriefSweep.model_validate(each) for each in page["data"])

    def sweep(self, sweep_id: str) -> Sweep:
        """Return a sweep with its jobs in their current states. Raises ApiError `sweep_not_found`."""
        return Sweep.model_validate_json(self._service.send("GET", _path(sweep_id, "sweeps")).content)

    def cancel_sweep(self, sweep_id: str) -> Sweep:
        """Cancel all jobs of a sweep that have not ended."""
        answer = self._service.send("POST", f"{_path(sweep_id, 'sweeps')}/cancel", repeat=True)
        return Sweep.model_validate_json(answer.content)

    def events(self, job_id: str, *, after: int = 0, kinds: Sequence[str] = ()) -> Iterator[Event]:
        """Yield the events after number `after` so far, oldest first; only those of `kinds` if any are given."""
        while True:
            query = {"after": after} | ({"kind": [*kinds]} if kinds else {})
            page = self._service.send("GET", f"{_path(job_id)}/events", query=query).json()
            for each in page["data"]:
                event = Event.model_validate(each)
                after = event.seq
                yield event
            if not page["has_more"]:
                return

    def stream_events(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """Yield the events after number `after`, and then each new one until the job has ended.

        A broken connection is made again; no event is missed, and none comes twice.
        """
        return follow(self._service, f"{_path(job_id)}/events/stream", after, Event)

    def logs(
        self, job_id: str, *, level: str = "debug", tail: int | None = None, after: int | None = None
    ) -> Iterator[LogLine]:
        """Yield the lines of a job's log so far, of at least `level`: the last `tail`, or all after number `after`."""
        query: dict[str, Any] = {"level": level} | ({"tail": tail} if tail else {"after": after or 0})
        while True:
            page = self._service.send("GET", f"{_path(job_id)}/logs", query=query).json()
            yield from (LogLine.model_validate(each) for each in page["data"])
            if not page["has_more"]:
                return
            query["after"] = page["data"][-1]["seq"]

    def stream_logs(self, job_id: str, *, level: str = "debug", after: int = 0) -> Iterator[LogLine]:
        """Yield the lines after number `after`, and then each new one until the job has ended."""
        return follow(self._service, f"{_path(job_id)}/logs/stream?{urlencode({'level': level})}", after, LogLine)

    @property
    def datasets(self) -> Datasets:
        """The calls for uploaded data files: upload, list, get, preview, statistics, delete."""
        return Datasets(self._service)

    def inspect(self, model: str | Path | Mapping[str, Any], *, revision: str | None = None) -> Inspection:
        """Describe a model from its headers, and what the usual presets would make of it; `model` as in `submit`."""
        query = dict(model_of(model)) | ({"revision": revision} if revision else {})
        return Inspection.model_validate_json(self._service.send("GET", "/v1/models/inspect", query=query).content)

    def models(self, *, page_size: int = 50) -> Iterator[UsedModel]:
        """Yield the models that the project's jobs used, newest activity first, loaded page by page."""
        for page in self._pages("/v1/models", {"limit": page_size}):
            yield from (UsedModel.model_validate(each) for each in page["data"])

    def model_folders(self) -> ModelFolders:
        """Return the models on the server, below the folders that jobs may read. A job names one by its path."""
        return ModelFolders.model_validate(self._service.send("GET", "/v1/models/folders").json())

    def results_of(self, model: str | Path) -> ModelResults:
        """Return all results of a model, newest first; `model` is a name that `models` yields, or as in `submit`.

        Raises ApiError `model_not_used` if no job used it.
        """
        (name,) = model_of(model).values()
        pages = [*self._pages("/v1/models/results", {"model": name, "limit": 100})]
        return ModelResults.model_validate(pages[0] | {"data": [each for page in pages for each in page["data"]]})

    @property
    def base_url(self) -> str:
        """The address of the service."""
        return self._service.base_url

    def readiness(self) -> httpx2.Response:
        """Return the service's own report on its health: {status, database, broker, schema, integrity}.

        A service that is not ready is no error here: the answer has the status 503.
        """
        return self._service.read_health("/healthz/ready")

    def presets(self) -> Sequence[dict[str, Any]]:
        """Return the presets: the named configs of the service."""
        answer = self._service.send("GET", "/v1/presets").json()
        return [dict(each) for each in answer["data"]]

    def wait(
        self,
        job_id: str,
        *,
        timeout_s: float | None = None,
        poll_s: float = 1.0,
        on_change: Callable[[Job], None] | None = None,
    ) -> Job:
        """Wait until the job has ended, in whatever state, and return it. Raises WaitTimeout after `timeout_s`."""
        return self._poll(
            job_id,
            lambda job: job.is_final,
            lambda job: job.state,
            timeout_s=timeout_s,
            poll_s=poll_s,
            on_change=on_change,
        )

    def artifacts(self, job_id: str) -> Sequence[ArtifactFile]:
        """Return the files of a succeeded job. Raises ApiError `not_ready` before."""
        answer = self._service.send("GET", f"{_path(job_id)}/artifacts").json()
        return [ArtifactFile.model_validate(each) for each in answer["data"]]

    def report(self, job_id: str) -> dict[str, Any]:
        """Return the report.json of a succeeded job. Raises ApiError `not_ready` before."""
        answer: dict[str, Any] = self._service.send("GET", f"{_path(job_id)}/artifacts/report.json").json()
        return answer

    def change(self, job_id: str, base: str) -> ResultChange:
        """Return whether the result of a job is worse than that of the job `base`, measured on the same tokens.

        Without such measurements `not_tested` has the reason. Raises ApiError `not_ready` before both have succeeded.
        """
        answer = self._service.send("GET", f"{_path(job_id)}/change", query={"base": base}).json()
        return ResultChange.model_validate(answer)

    def download(
        self, job_id: str, folder: Path, *, on_bytes: Callable[[ArtifactFile, int], None] | None = None
    ) -> Path:
        """Download the whole artifact into `folder`, and check each file against its SHA-256.

        Correct files that are already there are kept; an interrupted file continues at its last byte, also in a later
        call. Raises ApiError and BitfoundryError.
        """
        for file in self.artifacts(job_id):
            download(self._service, f"{_path(job_id)}/artifacts/{quote(file.path)}", file, folder, on_bytes)
        return folder

    def download_tar(self, job_id: str, target: Path) -> Path:
        """Download the whole artifact as the tar file `target`, and check each file in it against its SHA-256.

        Unlike `download`, a broken download starts again. Raises ApiError and BitfoundryError.
        """
        download_tar(self._service, f"{_path(job_id)}/artifacts.tar", self.artifacts(job_id), target)
        return target

    def close(self) -> None:
        self._service.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _pages(self, path: str, query: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the pages of a list."""
        while True:
            page = self._service.send("GET", path, query=query).json()
            yield page
            if not page["has_more"]:
                return
            query = query | {"cursor": page["next_cursor"]}

    def _poll(
        self,
        job_id: str,
        is_over: Callable[[Job], bool],
        what: Callable[[Job], str],
        *,
        timeout_s: float | None,
        poll_s: float = 1.0,
        on_change: Callable[[Job], None] | None,
    ) -> Job:
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        seen: Job | None = None
        while True:
            job = self.get(job_id)
            if on_change is not None and job != seen:
                on_change(job)
            seen = job
            if is_over(job):
                return job
            if limit is not None and time.monotonic() >= limit:
                message = f"job {job_id} is still {what(job)} after {timeout_s:g} s"
                raise WaitTimeout(message, hint="wait again, or cancel it")
            self._service.pause(poll_s)

    def _job(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Job:
        """Send a request and return the job in its answer. With an idempotency `key` it may be repeated."""
        sent = {"Idempotency-Key": key} if key else headers
        answer = self._service.send(method, path, body=body, headers=sent, repeat=key is not None)
        return Job.model_validate_json(answer.content)


def _path(identity: str, kind: str = "jobs") -> str:
    return f"/v1/{kind}/{quote(identity, safe='')}"
