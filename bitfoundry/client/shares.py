"""Calls for read-only links to a run's report: `client.shares`."""

from collections.abc import Sequence
from urllib.parse import quote

from bitfoundry.client.project_answers import Share as Share
from bitfoundry.client.transport import Transport


class Shares:
    """Calls for read-only links."""

    def __init__(self, service: Transport) -> None:
        self._service = service

    def create(self, job_id: str, *, expires_in_s: int | None = None) -> Share:
        """Make a link to the report of a succeeded job: whoever has it can read the report, without a key.

        It ends after `expires_in_s` seconds, by default after a week. Keep the `url`: it is shown once.
        """
        body = {} if expires_in_s is None else {"expires_in_s": expires_in_s}
        return Share.model_validate_json(self._service.send("POST", _path(job_id), body=body).content)

    def list(self, job_id: str) -> Sequence[Share]:
        """Return the links to a job that have not expired, oldest first."""
        return [Share.model_validate(row) for row in self._service.send("GET", _path(job_id)).json()["data"]]

    def revoke(self, job_id: str, share_id: str) -> None:
        """Revoke a link: it opens nothing from now on. Raises ApiError `share_not_found`."""
        self._service.send("DELETE", f"{_path(job_id)}/{quote(share_id, safe='')}")


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}/shares"
