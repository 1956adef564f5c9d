"""What the project keeps of its jobs, from Python: `client.retention`."""

from bitfoundry.client.answers import Answer
from bitfoundry.client.transport import Transport


class RetentionPolicy(Answer):
    """What the project keeps; `service_keep_*_days` are the operator's, for all projects. None: no limit."""

    keep_last: int | None = None
    keep_days: int | None = None
    service_keep_jobs_days: float | None = None
    service_keep_logs_days: float | None = None


class DueJob(Answer):
    """A job that the policy does not keep, and why; `bytes` are those of its artifact."""

    id: str
    name: str | None = None
    state: str
    finished_at: str
    bytes: int
    reason: str


class DueJobs(Answer):
    """The oldest first; `has_more` if there are more than one answer lists. `num_pinned` jobs are kept as pinned."""

    data: list[DueJob]
    bytes: int
    num_pinned: int
    has_more: bool


class Retention:
    """A job stays as long as `keep_last` or `keep_days` keeps it; pinned jobs stay. Without a policy all stay."""

    def __init__(self, service: Transport) -> None:
        self._service = service

    def show(self) -> RetentionPolicy:
        """The policy of the project."""
        return RetentionPolicy.model_validate_json(self._service.send("GET", "/v1/retention").content)

    def set(self, *, keep_last: int | None = None, keep_days: int | None = None) -> RetentionPolicy:
        """Keep the newest `keep_last` jobs and those that ended within `keep_days`; all without both (`admin`)."""
        body = {"keep_last": keep_last, "keep_days": keep_days}
        answer = self._service.send("PUT", "/v1/retention", body=body, repeat=True)
        return RetentionPolicy.model_validate_json(answer.content)

    def preview(self, *, keep_last: int | None = None, keep_days: int | None = None) -> DueJobs:
        """Which jobs would go, and why: by these numbers, or by the policy that is set. Nothing is changed."""
        asked = {"keep_last": keep_last, "keep_days": keep_days}
        body = {name: value for name, value in asked.items() if value is not None}
        answer = self._service.send("POST", "/v1/retention/preview", body=body or None, repeat=True)
        return DueJobs.model_validate_json(answer.content)

    def run(self) -> DueJobs:
        """Delete now what the policy does not keep (`admin`): those that went, at most a thousand."""
        return DueJobs.model_validate_json(self._service.send("POST", "/v1/retention/run", repeat=True).content)
