"""Whatever the OpenAPI document allows, and much that it does not, with a key and without: no answer is a 5xx."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from api.store.engine import Sessions
from api.store.queue import control
from tests.support.api import DOORS, OPEN_ROUTES, SHARED_ROUTES
from tests.support.params import with_rare
from tests.support.service import Server

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
NOT_HERE = {"PUT /v1/uploads/{upload_id}/parts/{number}"}  # its body is bytes, which have no schema


@pytest.fixture
def service(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "*")
    yield server


def operations(server: Server) -> list[Any]:
    document = httpx2.get(f"{server.url}/openapi.json", trust_env=False, timeout=60).json()
    found = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    assert len(found) > 60
    return [operation for operation in found if operation.label not in NOT_HERE]


def fuzz(operation: Any, mode: GenerationMode, server: Server, key: str | None, num_examples: int, job_id: str) -> int:
    """Send requests that fit the document, or such that do not; how many."""
    num_sent = 0

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        nonlocal num_sent
        if "job_id" in (case.path_parameters or {}) and len(str(case.path_parameters["job_id"])) % 2:
            case.path_parameters["job_id"] = job_id  # one that exists, and has ended
        case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() != "authorization"}
        if key is not None:
            case.headers["Authorization"] = f"Bearer {key}"
        answer = case.call(base_url=server.url, timeout=30)
        if key is None and operation.path not in OPEN_ROUTES | SHARED_ROUTES:
            known = {400, 401} if mode is GenerationMode.POSITIVE else {400, 401, 404, 405, 413, 415, 422}
            if "%0A" in answer.request.url:
                known |= {404}  # no route has a line break in its path, so no route asks for a key
            if (operation.method.upper(), operation.path) in DOORS:
                known |= {404}  # there is no provider here
            assert answer.status_code in known, (operation.label, answer.status_code)
        if answer.status_code >= 400:
            assert answer.headers["content-type"][0] == "application/problem+json", operation.label
        case.validate_response(answer, checks=CHECKS)
        num_sent += 1

    try:
        send()
    except Unsatisfiable:  # there is nothing to get wrong in a request without parameters
        assert mode is GenerationMode.NEGATIVE
    return num_sent


@pytest.mark.parametrize("num_examples", [1, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("with_key", with_rare([True, False], [True]))
def test_no_answer_is_a_5xx(
    with_key: bool, num_examples: int, service: Server, sessions: Sessions, submit: Callable[..., str]
) -> None:
    job_id = submit()
    with sessions.begin() as session:
        control.cancel(session, job_id)
    key = service.key if with_key else None
    found = operations(service)
    sent = {
        mode: [fuzz(operation, mode, service, key, num_examples, job_id) for operation in found]
        for mode in GenerationMode
    }
    assert all(sent[GenerationMode.POSITIVE])
    assert sum(map(bool, sent[GenerationMode.NEGATIVE])) > len(found) // 2
