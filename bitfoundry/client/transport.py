"""Requests to the service: retried where that is safe, with failures as ApiError and its code.

All waiting is in four methods, so that the same calls can also run on asyncio (see `async_client`).
"""

import json
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx2

from bitfoundry.errors import ApiError

NUM_TRIES = 4  # for a request that may be repeated
AWAY = {429, 502, 503, 504}  # the service is away or busy: it may answer in a moment
KEY_HINT = "Give a valid key of this service: Client(url, api_key), --api-key, or BITFOUNDRY_API_KEY."

_JOB_HINT = "client.find(NAME) returns the job of a name, of the start of an id, or of 'last': pass its `id`."
ID_HINTS = {
    "job_id": _JOB_HINT,
    "base": _JOB_HINT,
    "sweep_id": "client.sweeps() yields the sweeps with their ids and names: pass the `id` of one.",
}
"""For an id that the service does not take: how to find it by what it is called."""


def is_local(url: str) -> bool:
    """Return whether the address leads to this machine from any machine."""
    return urlsplit(url).hostname in {"127.0.0.1", "localhost", "::1"}


def connection_options(base_url: str, api_key: str, timeout_s: float) -> dict[str, Any]:
    """Return the options of every HTTP connection to the service."""
    return {
        "base_url": base_url,
        "headers": {"Authorization": f"Bearer {api_key}"},
        "timeout": timeout_s,
        "trust_env": not is_local(base_url),  # a proxy cannot reach our loopback
    }


@dataclass(frozen=True)
class Form:
    """A form with files, each with its name and its bytes, as the body of a request."""

    fields: Mapping[str, str]
    files: Mapping[str, tuple[str, bytes]]


class Arriving(Protocol):
    """An answer whose body has not been read yet."""

    @property
    def status_code(self) -> int: ...

    def iter_lines(self) -> Iterator[str]: ...

    def iter_bytes(self) -> Iterator[bytes]: ...

    def read(self) -> bytes: ...

    def json(self) -> Any: ...


class Transport:
    """A connection to the service, safe to use from several threads."""

    def __init__(
        self, base_url: str, api_key: str, *, timeout_s: float, transport: httpx2.BaseTransport | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = httpx2.Client(**connection_options(base_url, api_key, timeout_s), transport=transport)

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | bytes | Form | None = None,
        headers: Mapping[str, str] | None = None,
        repeat: bool = False,
        timeout_s: float | None = None,
    ) -> httpx2.Response:
        """Send a request and return the answer. Raises ApiError for an error status.

        A GET, or a request with `repeat`, is tried again while the service is away or busy. A mapping is sent as JSON.
        """
        sent = _content(body) if timeout_s is None else {**_content(body), "timeout": timeout_s}
        num_tries = NUM_TRIES if repeat or method == "GET" else 1
        answer = self._try(method, path, num_tries, AWAY, params=query, headers=headers, **sent)
        if answer.status_code >= 400:
            raise _problem(answer, (isinstance(body, Mapping) and body) or query)
        return answer

    def read_health(self, path: str) -> httpx2.Response:
        """Return the answer to a GET of the service's health: one with the status 503 has a report, too."""
        answer = self._try("GET", path, NUM_TRIES, AWAY - {503})
        if answer.status_code >= 400 and answer.status_code != 503:
            raise _problem(answer)
        return answer

    def _try(self, method: str, path: str, num_tries: int, away: Collection[int], **sent: Any) -> httpx2.Response:
        """Send a request until it is answered with a status that is not among `away`, at most so many times."""
        for attempt in range(1, num_tries + 1):
            try:
                answer = self._request(method, path, **sent)
            except httpx2.TransportError as error:
                if attempt == num_tries:
                    raise self.no_answer(error) from error
                self.pause(0.2 * 2**attempt)
                continue
            if answer.status_code in away and attempt < num_tries and not _is_over_quota(answer):
                self.pause(_retry_after_s(answer, default=0.2 * 2**attempt))
                continue
            break
        return answer

    @contextmanager
    def stream(
        self, path: str, *, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Iterator[Arriving]:
        """Yield the answer to a GET as it arrives. Raises ApiError, and httpx2's TransportError if it breaks off."""
        more: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
        with self._open(path, headers=headers, **more) as answer:
            if answer.status_code >= 400:
                answer.read()
                raise _problem(answer)
            yield answer

    def no_answer(self, error: httpx2.TransportError) -> ApiError:
        """Return the ApiError that explains a TransportError to a person."""
        return ApiError(
            0,
            {
                "code": "no_answer",
                "detail": f"{self.base_url} does not answer: {error}.",
                "hint": "Is the service up? `bitfoundry up` starts one on this machine.",
            },
        )

    @property
    def trusts_environment(self) -> bool:
        """True if the environment's proxies are used."""
        return self._http.trust_env

    def pause(self, seconds: float) -> None:
        """Wait before another attempt."""
        time.sleep(seconds)

    def close(self) -> None:
        self._http.close()

    def _request(self, method: str, path: str, **sent: Any) -> httpx2.Response:
        return self._http.request(method, path, **sent)

    def _open(self, path: str, **sent: Any) -> AbstractContextManager[Arriving]:
        return self._http.stream("GET", path, **sent)


def _content(body: Mapping[str, Any] | bytes | Form | None) -> dict[str, Any]:
    """Return the arguments with which httpx2 sends this body."""
    if body is None:
        return {}
    if isinstance(body, Form):
        return {"data": body.fields, "files": body.files}
    return {"content": body} if isinstance(body, bytes) else {"json": body}


def _problem(answer: Arriving, sent: Mapping[str, Any] | None = None) -> ApiError:
    try:
        problem = answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    if problem.get("code") == "unauthorized":
        problem["hint"] = KEY_HINT  # the service's own is about a header
    first: dict[str, Any] = next(iter(problem.get("errors") or []), {})
    if first.get("parameter") in ID_HINTS and problem.get("code") == "invalid_request":
        problem["hint"] = ID_HINTS[first["parameter"]]
    return ApiError(answer.status_code, problem, sent)


def _is_over_quota(answer: httpx2.Response) -> bool:
    """Return whether a quota is exceeded: only ending jobs free it, perhaps in hours, so the caller should know now."""
    return answer.status_code == 429 and _problem(answer).code == "quota_exceeded"


def _retry_after_s(answer: httpx2.Response, default: float) -> float:
    try:
        return min(max(float(answer.headers.get("Retry-After", "")), 0.1), 30.0)
    except ValueError:
        return default
