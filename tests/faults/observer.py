"""The client of the fault matrix: it submits and asks all the time, notes every answer, and checks what came of it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import httpx2

from tests.faults.rig import Rig
from tests.support.waiting import wait_until

ASK_S = 12.0  # longer than the service's own limits: what takes longer hangs
PAUSE_S = 0.3
RECOVERY_S = 240.0
FAILING = ("eats",)
"""The modes of jobs that cannot succeed."""
FINAL = {"succeeded", "failed", "cancelled"}


class Observer:
    """Counts in ``answers`` what a client sees, and remembers the jobs that were accepted."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.answers: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.accepted: dict[str, str] = {}
        self._rig, self._name = rig, name
        self._unanswered: list[tuple[str, dict[str, Any]]] = []
        self._num_sent = 0

    def clear(self) -> None:
        """Forget the answers so far."""
        self.answers.clear()
        self.probes.clear()
        self.slowest_s = 0.0

    def submit(self, mode: str = "fast", **more: Any) -> str | None:
        """Submit a job, and first again those without an answer. Return its id if it was accepted."""
        self._num_sent += 1
        body = {"model": {"path": str(self._rig.models / mode)}, "config": {"preset": "fp8"}, **more}
        self._unanswered.append((f"{self._name} {self._num_sent} {time.time_ns()}", body))
        job_id = None
        for key, asked in [*self._unanswered][-2:]:
            answer = self._ask("POST", "/v1/jobs", self.answers, json=asked, headers={"Idempotency-Key": key})
            if answer is not None and answer.status_code == 202:
                job_id = answer.json()["id"]
                self.accepted[job_id] = mode
                self._unanswered.remove((key, asked))
        return job_id

    def look(self) -> None:
        """Submit a job and ask the probe for readiness."""
        self.submit()
        answer = self._ask("GET", "/healthz/ready", self.probes)
        if answer is not None:
            told = answer.json()
            parts = [f"{name}: {told[name]}" for name in ("database", "broker", "disk") if told.get(name) != "ok"]
            self.probes[" ".join([str(answer.status_code), told["status"], *parts])] += 1

    def watch(self, seconds: float) -> None:
        """Look again and again for some seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            time.sleep(PAUSE_S)

    def recover(self) -> float:
        """Return the seconds until a new job was accepted and has succeeded."""
        began, mine = time.monotonic(), None
        while mine is None or self.job(mine).get("state") != "succeeded":
            assert time.monotonic() - began < RECOVERY_S, f"{self._name}: no new job was done, {self.job(mine or '')}"
            mine = mine or self.submit()
            time.sleep(PAUSE_S)
        return time.monotonic() - began

    def job(self, job_id: str) -> dict[str, Any]:
        """Return the job as the API shows it, or nothing while it does not."""
        answer = self._ask("GET", f"/v1/jobs/{job_id}", Counter())
        return answer.json() if answer is not None and answer.status_code == 200 else {}

    def settle(self) -> None:
        """Repeat what had no answer, and wait until all accepted jobs have ended."""

        def is_over() -> bool:
            for key, asked in [*self._unanswered]:
                answer = self._ask("POST", "/v1/jobs", Counter(), json=asked, headers={"Idempotency-Key": key})
                if answer is not None and answer.status_code == 202:
                    self.accepted[answer.json()["id"]] = "fast"
                    self._unanswered.remove((key, asked))
            states = {job_id: self.job(job_id).get("state") for job_id in self.accepted}
            return not self._unanswered and set(states.values()) <= FINAL

        wait_until(is_over, timeout_s=RECOVERY_S, note=lambda: self._name)

    def attempts(self, job_id: str) -> list[str]:
        return self._query("SELECT outcome FROM attempt WHERE job_id = %s ORDER BY number", [job_id])

    def broken(self) -> list[str]:
        """Return what was lost or done twice, in words."""
        stored = set(self._query("SELECT id FROM job WHERE id = ANY(%s)", [[*self.accepted]]))
        wrong = [f"{job_id} was accepted and is gone" for job_id in self.accepted if job_id not in stored]
        for job_id, mode in self.accepted.items():
            num_succeeded = self.attempts(job_id).count("succeeded")
            if num_succeeded != (mode not in FAILING):
                wrong.append(f"{job_id} ({mode}) succeeded {num_succeeded} times")
        return wrong

    def _query(self, statement: str, values: list[Any]) -> list[Any]:
        with self._rig.database() as connection:
            return [next(iter(row.values())) for row in connection.execute(statement, values).fetchall()]

    def _ask(self, method: str, path: str, counted: Counter[str], **more: Any) -> httpx2.Response | None:
        headers = {"Authorization": f"Bearer {self._rig.key}"} | more.pop("headers", {})
        began = time.monotonic()
        try:
            answer = httpx2.request(
                method, f"{self._rig.url}{path}", headers=headers, trust_env=False, timeout=ASK_S, **more
            )
        except httpx2.TimeoutException:
            counted["no answer"] += 1
            return None
        except httpx2.TransportError:
            counted["no connection"] += 1
            return None
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        if not path.startswith("/healthz"):
            code = "" if answer.is_success else f" `{answer.json()['code']}`"
            counted[f"{answer.status_code}{code}"] += 1
        return answer
