"""Pydantic's errors as entries of a problem."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from fastapi import FastAPI, Path, Query
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from api.http.errors import entry_of, install
from quantcore.config.values import form_of
from tests.support.sources import ROOT


class Evaluation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    num_windows: int = 0


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    gate: Literal["off", "warn", "fail"]
    evaluation: Evaluation | None = None
    parts: dict[str, list[Evaluation]] = {}


def test_allowed_is_a_list_of_values() -> None:
    with pytest.raises(ValidationError) as caught:
        Body.model_validate({"gate": "maybe"})
    (problem,) = caught.value.errors()
    entry = entry_of({**problem, "loc": ("body", *problem["loc"])})
    assert (entry["pointer"], entry["allowed"]) == ("#/gate", ["off", "warn", "fail"])
    assert "allowed" not in entry_of({"type": "missing", "loc": ("body", "gate"), "msg": "required"})


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    install(app)

    @app.post("/jobs/{job_id}")
    def _post(
        body: Body,
        job_id: Annotated[str, Path(pattern="^job_[0-9a-f]{32}$")],
        limit: Annotated[int, Query(ge=1)] = 1,
    ) -> None: ...

    async def with_id(scope: Scope, receive: Receive, send: Send) -> None:
        scope["request_id"] = "req_1"
        await app(scope, receive, send)

    return TestClient(with_id)


JOB = "/jobs/job_" + 32 * "0"


@pytest.mark.parametrize(
    ("path", "body", "detail", "hint"),
    [
        (JOB, {"gate": "secret"}, "/gate is not valid: it can be off, warn, fail.", None),
        (JOB, {}, "/gate is not valid: this field is required.", None),
        (JOB, {"gate": "off", "gates": 1}, "/gates is not valid: there is no such field.", "Did you mean 'gate'?"),
        (JOB, {"gate": "off", "evaluation": {"windows": 3}},
         "/evaluation/windows is not valid: there is no such field.", "Did you mean 'num_windows'?"),
        (JOB, {"gate": "off", "parts": {"a": [{"windows": 3}]}},
         "/parts/a/0/windows is not valid: there is no such field.", "Did you mean 'num_windows'?"),
        (JOB, {"gate": "off", "evaluation": {"evaluate": 3}},
         "/evaluation/evaluate is not valid: there is no such field.", None),
        (JOB, {"gate": "off", "evaluation": "x"},
         "/evaluation is not valid: it must be an object such as {...}.", None),
        (JOB, {"gate": "off", "zz": 1}, "/zz is not valid: there is no such field.", None),
        (f"{JOB}?limit=0", {"gate": "off"}, "limit is not valid: it must be greater than or equal to 1.", None),
        ("/jobs/last", {"gate": "off"},
         "job_id is not valid: it must be an id: job_ and 32 hex digits; 'last' was given.", None),
        ("/jobs/last", {}, "job_id is not valid: it must be an id: job_ and 32 hex digits; 'last' was given. There are"
         " 2 faults in all.", None),
    ],
)  # fmt: skip
def test_a_request_that_is_not_valid_is_told_where_and_why(
    client: TestClient, path: str, body: dict[str, Any], detail: str, hint: str | None
) -> None:
    problem = client.post(path, json=body).json()
    assert (problem["detail"], problem.get("hint")) == (detail, hint)
    assert "secret" not in json.dumps(problem)


def test_every_pattern_of_the_api_has_words() -> None:
    def patterns(part: Any) -> Iterator[str]:
        if isinstance(part, dict) and isinstance(part.get("pattern"), str):
            yield part["pattern"]
        for member in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            yield from patterns(member)

    found = {*patterns(json.loads((ROOT / "dashboard" / "openapi.json").read_text("utf-8")))}
    assert found and not [pattern for pattern in found if pattern in form_of(pattern)]
