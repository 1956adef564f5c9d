"""Calls for the project's retention policy: `client.retention`."""

from bitfoundry.client.project_answers import DueJob as DueJob
from bitfoundry.client.project_answers import DueJobs as DueJobs
from bitfoundry.client.project_answers import RetentionPolicy as RetentionPolicy
from bitfoundry.client.transport import Transport


class Retention:
    """Calls for the retention policy of a project.

    A job stays as long as `keep_last` or `keep_days` keeps it; pinned jobs stay. Without a policy all jobs stay.
    """

    def __init__(self, service: Transport) -> None:
        self._service = service

    def show(self) -> RetentionPolicy:
        """Return the policy of the project."""
        return RetentionPolicy.model_validate_json(self._service.send("GET", "/v1/retention").content)

    def set(self, *, keep_last: int | None = None, keep_days: int | None = None) -> RetentionPolicy:
        """Keep the newest `keep_last` jobs and those that ended within `keep_days`; all if both are None (`admin`)."""
        body = {"keep_last": keep_last, "keep_days": keep_days}
        answer = self._service.send("PUT", "/v1/retention", body=body, repeat=True)
        return RetentionPolicy.model_validate_json(answer.content)

    def preview(self, *, keep_last: int | None = None, keep_days: int | None = None) -> DueJobs:
        """Return the jobs that these numbers, or the current policy, would delete, with reasons. Nothing is changed."""
        numbers = {"keep_last": keep_last, "keep_days": keep_days}
        body = {name: value for name, value in numbers.items() if value is not None}
        answer = self._service.send("POST", "/v1/retention/preview", body=body or None, repeat=True)
        return DueJobs.model_validate_json(answer.content)

    def run(self) -> DueJobs:
        """Delete the jobs that the policy does not keep, at most a thousand, and return them (`admin`)."""
        return DueJobs.model_validate_json(self._service.send("POST", "/v1/retention/run", repeat=True).content)
