"""The service from Python: typed, synchronous, and light (no torch, no web framework).

client = Client("http://127.0.0.1:8765", api_key)
job = client.submit("/models/SmolLM2-135M", config="w4a16", export=["compressed_tensors"])
job = client.wait(job.id)
client.download(job.id, Path("smollm2-w4a16"))
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2

from bitfoundry.answers import ArtifactFile, Event, Job
from bitfoundry.errors import ApiError, BitfoundryError, WaitTimeout

NUM_TRIES = 4  # of a request that may be repeated
CHUNK_BYTES = 1 << 20


class Client:
    """A connection to the service. Safe to use from several threads; close it or use it as a context manager."""

    def __init__(
        self, base_url: str, api_key: str, *, timeout_s: float = 30.0, transport: httpx2.BaseTransport | None = None
    ) -> None:
        loopback = urlsplit(base_url).hostname in {"127.0.0.1", "localhost", "::1"}
        self._http = httpx2.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=timeout_s,
            trust_env=not loopback,  # a proxy cannot reach our loopback
            transport=transport,
        )

    def submit(
        self,
        model: str | Path | Mapping[str, Any],
        *,
        config: str | Mapping[str, Any],
        export: Sequence[str] | None = None,
        calibration: Mapping[str, Any] | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Job:
        """Queue a job. `model` is a folder of the service's machine, a Hub id `org/name`, or the request's own object;
        `config` is a preset's name or a whole config. Raises ApiError; a bad job is refused before it is queued."""
        body = _planned(model, config, export, calibration)
        body |= {key: value for key, value in {"name": name, "labels": labels}.items() if value is not None}
        return Job.model_validate_json(self._send("POST", "/v1/jobs", body=body).content)

    def plan(
        self,
        model: str | Path | Mapping[str, Any],
        *,
        config: str | Mapping[str, Any],
        export: Sequence[str] | None = None,
        calibration: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What `submit` would do, layer by layer, without doing it. Raises ApiError."""
        answer = self._send("POST", "/v1/plans", body=_planned(model, config, export, calibration), repeat=True)
        return dict(answer.json())

    def get(self, job_id: str) -> Job:
        """One job; ApiError `job_not_found`."""
        return Job.model_validate_json(self._send("GET", f"/v1/jobs/{quote(job_id, safe='')}").content)

    def list(self, *, states: Sequence[str] = (), page_size: int = 50) -> Iterator[Job]:
        """All jobs, newest first, asked for page by page as you go."""
        query: dict[str, Any] = {"limit": page_size} | ({"state": list(states)} if states else {})
        while True:
            page = self._send("GET", "/v1/jobs", query=query).json()
            yield from (Job.model_validate(each) for each in page["data"])
            if not page["has_more"]:
                return
            query["cursor"] = page["next_cursor"]

    def events(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """What has happened so far since event `after`, oldest first."""
        while True:
            path = f"/v1/jobs/{quote(job_id, safe='')}/events"
            page = self._send("GET", path, query={"after": after}).json()
            for each in page["data"]:
                event = Event.model_validate(each)
                after = event.seq
                yield event
            if not page["has_more"]:
                return

    def cancel(self, job_id: str) -> Job:
        """Ask for the job's end; ApiError `job_already_final` when it has ended."""
        answer = self._send("POST", f"/v1/jobs/{quote(job_id, safe='')}/cancel")
        return Job.model_validate_json(answer.content)

    def presets(self) -> Sequence[dict[str, Any]]:
        """The named configs that the service knows."""
        answer = self._send("GET", "/v1/presets").json()
        return [dict(each) for each in answer["data"]]

    def wait(
        self,
        job_id: str,
        *,
        timeout_s: float | None = None,
        poll_s: float = 1.0,
        on_change: Callable[[Job], None] | None = None,
    ) -> Job:
        """Poll until the job has ended, in whatever way, and return it. WaitTimeout when that takes longer."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        seen: Job | None = None
        while True:
            job = self.get(job_id)
            if on_change is not None and job != seen:
                on_change(job)
            seen = job
            if job.is_final:
                return job
            if limit is not None and time.monotonic() >= limit:
                message = f"job {job_id} is still {job.state} after {timeout_s:g} s"
                raise WaitTimeout(message, hint="wait again, or cancel it")
            time.sleep(poll_s)

    def artifacts(self, job_id: str) -> Sequence[ArtifactFile]:
        """The files of a succeeded job; ApiError `not_ready` before."""
        answer = self._send("GET", f"/v1/jobs/{quote(job_id, safe='')}/artifacts").json()
        return [ArtifactFile.model_validate(each) for each in answer["data"]]

    def download(
        self, job_id: str, folder: Path, *, on_bytes: Callable[[ArtifactFile, int], None] | None = None
    ) -> Path:
        """Fetch the whole artifact into `folder`, each file checked against its SHA-256; files already there and right
        are kept, so that a broken download goes on where it stopped. Raises ApiError, BitfoundryError."""
        for file in self.artifacts(job_id):
            target = folder / _inside(file.path)
            if target.is_file() and _sha256(target) == file.sha256:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            self._fetch(job_id, file, target, on_bytes)
        return folder

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _fetch(
        self, job_id: str, file: ArtifactFile, target: Path, on_bytes: Callable[[ArtifactFile, int], None] | None
    ) -> None:
        partial = target.with_name(f"{target.name}.partial")
        digest = hashlib.sha256()
        url = f"/v1/jobs/{quote(job_id, safe='')}/artifacts/{quote(file.path)}"
        try:
            with self._http.stream("GET", url) as answer, partial.open("wb") as out:
                if answer.status_code >= 400:
                    answer.read()
                    raise _problem(answer)
                for chunk in answer.iter_bytes(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    if on_bytes is not None:
                        on_bytes(file, len(chunk))
            if digest.hexdigest() != file.sha256:
                raise BitfoundryError(f"{file.path} arrived damaged", hint="download again")
            partial.replace(target)
        except httpx2.TransportError as error:
            raise _no_answer(self._http.base_url, error) from error
        finally:
            partial.unlink(missing_ok=True)

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        repeat: bool = False,
    ) -> httpx2.Response:
        """One request; what may be repeated is tried again while the service is away or busy. Raises ApiError."""
        num_tries = NUM_TRIES if repeat or method == "GET" else 1
        for attempt in range(1, num_tries + 1):
            try:
                answer = self._http.request(method, path, params=query, json=body)
            except httpx2.TransportError as error:
                if attempt == num_tries:
                    raise _no_answer(self._http.base_url, error) from error
                time.sleep(0.2 * 2**attempt)
                continue
            if answer.status_code in {429, 502, 503, 504} and attempt < num_tries:
                time.sleep(_retry_after_s(answer, default=0.2 * 2**attempt))
                continue
            break
        if answer.status_code >= 400:
            raise _problem(answer)
        return answer


def _planned(
    model: str | Path | Mapping[str, Any],
    config: str | Mapping[str, Any],
    export: Sequence[str] | None,
    calibration: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The request body that jobs and plans share."""
    body: dict[str, Any] = {"model": _model(model), "config": {"preset": config} if isinstance(config, str) else config}
    if export is not None:
        body["export"] = list(export)
    if calibration is not None:
        body["calibration"] = calibration
    return body


def _model(model: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """A path when it looks like one (absolute, ~, ./, or there on this machine), else a Hub id."""
    if isinstance(model, Mapping):
        return model
    path = Path(model).expanduser()
    if isinstance(model, Path) or path.is_absolute() or model.startswith(".") or path.is_dir():
        return {"path": str(path.absolute())}
    return {"id": model}


def _problem(answer: httpx2.Response) -> ApiError:
    try:
        problem = answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        problem = {}
    return ApiError(answer.status_code, problem if isinstance(problem, dict) else {})


def _no_answer(base_url: httpx2.URL, error: httpx2.TransportError) -> ApiError:
    return ApiError(
        0,
        {
            "code": "no_answer",
            "detail": f"{str(base_url).rstrip('/')} does not answer: {error}",
            "hint": "is the service up? `bitfoundry up` starts one here",
        },
    )


def _retry_after_s(answer: httpx2.Response, default: float) -> float:
    try:
        return min(max(float(answer.headers.get("Retry-After", "")), 0.1), 30.0)
    except ValueError:
        return default


def _inside(name: str) -> PurePosixPath:
    """A relative path that stays in its folder: the service is trusted with bytes, not with our disk."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name or "\0" in name:
        raise BitfoundryError(f"the service named an unsafe file: {name!r}")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
