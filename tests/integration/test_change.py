"""Is one job's result worse than another's? Answered from what both reports keep of each window of text."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from api.store.engine import Sessions
from tests.support.reports import report, windows
from tests.support.results import succeed_with

Succeed = Callable[[dict[str, Any]], str]


@pytest.fixture
def succeed(settings: Settings, sessions: Sessions, submit: Callable[..., str]) -> Succeed:
    """``succeed(report)``: the id of a succeeded job with this report."""

    def make(content: dict[str, Any]) -> str:
        job_id = submit()
        succeed_with({"report.json": json.dumps(content).encode()}, job_id, settings, sessions)
        return job_id

    return make


def with_windows(kl: float, num: int = 12, **fields: Any) -> dict[str, Any]:
    content = report(kl=kl, **fields)
    content["quality"]["by_window"] = windows(kl, num=num)
    return content


def test_a_change_that_separate_intervals_hide_is_found_in_pairs(client: TestClient, succeed: Succeed) -> None:
    """The intervals of both results overlap by far; window by window, one is 20 % worse."""
    base, job = succeed(with_windows(0.1)), succeed(with_windows(0.12))
    answer = client.get(f"/v1/jobs/{job}/change", params={"base": base})
    assert answer.status_code == 200, answer.text
    change = answer.json()["change"]
    assert answer.json()["not_tested"] is None
    assert 0.15 < change["kl_change"]["low"] < change["kl_change"]["high"] < 0.25
    assert (change["verdict"], change["kl_change"]["value"]) == ("worse", pytest.approx(0.2, abs=0.02))
    back = client.get(f"/v1/jobs/{base}/change", params={"base": job}).json()["change"]
    assert (back["verdict"], back["kl_change"]["value"]) == ("better", pytest.approx(1 / 1.2 - 1, abs=0.02))


def test_without_a_test_there_is_a_reason(client: TestClient, succeed: Succeed) -> None:
    base = succeed(with_windows(0.1))
    others = {
        "different models": with_windows(0.1, model="sha256:b"),
        "different texts": with_windows(0.1, text="u"),
        "lacks the measurements of each window": report(),
        "not measured on text": report() | {"quality": None},
        "different tokens": with_windows(0.1, num=9),
        "another version": {"schema_version": 1},
    }
    for reason, content in others.items():
        answer = client.get(f"/v1/jobs/{succeed(content)}/change", params={"base": base}).json()
        assert answer["change"] is None and reason in answer["not_tested"], answer
    short = [succeed(with_windows(kl, num=7)) for kl in (0.1, 0.2)]
    assert "needs 8" in client.get(f"/v1/jobs/{short[1]}/change", params={"base": short[0]}).json()["not_tested"]
    same = succeed(with_windows(0.0))
    answer = client.get(f"/v1/jobs/{base}/change", params={"base": same}).json()
    assert "exactly what the original does" in answer["not_tested"]


def test_only_results_of_the_project_are_compared(
    client: TestClient, succeed: Succeed, submit: Callable[..., str]
) -> None:
    job, waiting = succeed(with_windows(0.1)), submit()
    for job_id, base, status in (
        (job, waiting, 409),
        (waiting, job, 409),
        (job, "job_" + "0" * 32, 404),
        (job, "../x", 422),
    ):
        answer = client.get(f"/v1/jobs/{job_id}/change", params={"base": base})
        assert answer.status_code == status, answer.text
