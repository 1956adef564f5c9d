"""The client of the soak: it draws requests, and remembers what the service accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.soak.service import REAL, Service

MODES = {
    "fast": 8, "steady": 4, "slow_once": 1, "goes_on": 1, "killed": 1, "fails": 1, "fails_retryable": 1, "tamper": 1,
    REAL: 1,
}  # fmt: skip
UNAVAILABLE = (503, 507)
ROWS = b'{"text": "a row of text"}\n' * 50


@dataclass
class Known:
    """A job of which the client knows."""

    mode: str
    final: str = ""
    code: str = ""  # of its failure
    may_move: bool = False  # it was asked to retry: what was final may change
    may_be_gone: bool = False


@dataclass
class Client:
    """Draws requests and remembers what was accepted. ``broken``: answers that no client should ever get."""

    service: Service
    draw: random.Random
    jobs: dict[str, Known] = field(default_factory=dict)
    unanswered: dict[str, str] = field(default_factory=dict)  # idempotency key -> mode
    broken: list[str] = field(default_factory=list)
    num_sent: int = 0
    num_unavailable: int = 0
    num_checks: int = 0
    num_blind: int = 0  # checks for which the database was away

    def act(self) -> None:
        """Send one request or a few."""
        weights: dict[Callable[[], None], int] = {self.submit: 6, self.order: 4, self.look: 3, self.upload: 1}
        self.draw.choices([*weights], [*weights.values()])[0]()

    def submit(self) -> None:
        mode = self.draw.choices([*MODES], [*MODES.values()])[0]
        self.unanswered[f"soak-{self.num_sent}"] = mode
        for key in [*self.unanswered][-3:]:
            self.submit_again(key)

    def submit_again(self, key: str) -> None:
        """Submit with a key that may have made a job already: the answer must be the same job."""
        mode = self.unanswered[key]
        body = {
            "model": {"path": str(self.service.models / mode)},
            "config": {"preset": "int8_weight_only" if mode == REAL else "fp8"},
            "calibration": {"num_samples": 2, "seq_len": 64},
            "evaluation": {"num_windows": 0, "num_prompts": 0, "seq_len": 64},
        }
        answer = self._ask("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": key})
        if answer is None or answer.status_code in UNAVAILABLE:
            return
        if answer.status_code not in (200, 201, 202):
            self.broken.append(f"submitting {mode}: {answer.status_code} {answer.text[:300]}")
        else:
            self.jobs.setdefault(answer.json()["id"], Known(mode))
        del self.unanswered[key]

    def order(self) -> None:
        """Cancel, pause, resume, retry or delete a random job in any state; the answer may be 409."""
        if not self.jobs:
            return
        job_id = self.draw.choice([*self.jobs])
        action = self.draw.choice(["cancel", "pause", "resume", "resume", "retry", "delete"])
        if action == "retry":
            self.jobs[job_id].may_move = True
        if action == "delete":
            self.jobs[job_id].may_be_gone = True
            answer = self._ask("DELETE", f"/v1/jobs/{job_id}")
        else:
            answer = self._ask("POST", f"/v1/jobs/{job_id}/{action}")
        if answer is None or answer.status_code in UNAVAILABLE:
            return
        is_gone = answer.status_code == 404 and self.jobs[job_id].may_be_gone
        if action == "delete" and answer.status_code == 409:
            self.jobs[job_id].may_be_gone = False
        if not (answer.is_success or answer.status_code == 409 or is_gone):
            self.broken.append(f"{action} of {job_id}: {answer.status_code} {answer.text[:300]}")

    def look(self) -> None:
        paths = ["/v1/jobs?limit=50", "/v1/workers", "/v1/datasets", "/metrics", "/healthz/live"]
        paths += [f"/v1/jobs/{job_id}" for job_id in [*self.jobs][-3:]]
        path = self.draw.choice(paths)
        answer = self._ask("GET", path)
        if answer is not None and not (answer.is_success or answer.status_code in (404, *UNAVAILABLE)):
            self.broken.append(f"GET {path}: {answer.status_code} {answer.text[:300]}")

    def upload(self) -> None:
        rows = ROWS + f'{{"text": "{self.num_sent}"}}\n'.encode()
        answer = self._ask("POST", "/v1/datasets", files={"file": ("rows.jsonl", rows)})
        if answer is not None and not (answer.is_success or answer.status_code in UNAVAILABLE):
            self.broken.append(f"upload: {answer.status_code} {answer.text[:300]}")

    def _ask(self, method: str, path: str, **more: Any) -> httpx2.Response | None:
        """Send a request; return the answer, or None if the connection broke."""
        self.num_sent += 1
        try:
            answer = self.service.ask(method, path, **more)
        except httpx2.TransportError:
            self.num_unavailable += 1
            return None
        self.num_unavailable += answer.status_code in UNAVAILABLE
        return answer
