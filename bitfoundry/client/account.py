"""Calls for members, keys, tokens, projects, the audit log and workers: `client.account`."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from bitfoundry.client.project_answers import AuditEntry as AuditEntry
from bitfoundry.client.project_answers import HubToken as HubToken
from bitfoundry.client.project_answers import Key as Key
from bitfoundry.client.project_answers import Member as Member
from bitfoundry.client.project_answers import MemberRef as MemberRef
from bitfoundry.client.project_answers import Project as Project
from bitfoundry.client.project_answers import QuotaUse as QuotaUse
from bitfoundry.client.project_answers import Worker as Worker
from bitfoundry.client.transport import Transport


class Account:
    """Calls for members, keys, tokens, projects, the audit log and workers.

    Most need the scope `admin`, those about other projects `operator`. Raises ApiError `insufficient_scope`.
    """

    def __init__(self, service: Transport) -> None:
        self._service = service

    def create_key(
        self,
        name: str,
        scopes: Sequence[str] | None = None,
        *,
        expires_at: datetime | str | None = None,
        project_id: str | None = None,
        member_id: str | None = None,
    ) -> Key:
        """Create a key with some of the scopes jobs:read, jobs:write, jobs:chat, admin and operator.

        The key of a member has the scopes of the role by default. Its `key` is shown once.
        """
        fields = {"name": name, "scopes": [*scopes] if scopes else None, "expires_at": _time(expires_at)}
        owner = {"project_id": project_id, "member_id": member_id}
        return self._key("POST", "/v1/keys", body=_given(fields | owner))

    def keys(self) -> Sequence[Key]:
        """Return all keys of the project, oldest first."""
        return [Key.model_validate(row) for row in self._service.send("GET", "/v1/keys").json()["data"]]

    def own_key(self) -> Key:
        """Return the key that this client uses."""
        return self._key("GET", "/v1/keys/self")

    def rotate_key(self, key_id: str, *, overlap_s: int = 0) -> Key:
        """Give the key a new secret. The old one works for `overlap_s` more seconds."""
        return self._key("POST", f"{_path('keys', key_id)}/rotate", body={"overlap_s": overlap_s})

    def revoke_key(self, key_id: str) -> Key:
        """Revoke the key immediately and permanently."""
        return self._key("POST", f"{_path('keys', key_id)}/revoke")

    def members(self) -> Sequence[Member]:
        """Return the present members of the project, oldest first."""
        return [Member.model_validate(row) for row in self._service.send("GET", "/v1/members").json()["data"]]

    def add_member(self, name: str, role: str, *, expires_at: datetime | str | None = None) -> Member:
        """Add a member as `viewer`, `editor` or `admin`. `first_key.key` is the key to sign in with, shown once."""
        body = _given({"name": name, "role": role, "expires_at": _time(expires_at)})
        return Member.model_validate_json(self._service.send("POST", "/v1/members", body=body).content)

    def edit_member(self, member_id: str, *, name: str | None = None, role: str | None = None) -> Member:
        """Change the name or the role of a member. A new role changes what the member's keys can do at once."""
        answer = self._service.send("PATCH", _path("members", member_id), body=_given({"name": name, "role": role}))
        return Member.model_validate_json(answer.content)

    def remove_member(self, member_id: str) -> None:
        """Remove a member and revoke the member's keys. Raises ApiError `last_admin` if nobody else is an admin."""
        self._service.send("DELETE", _path("members", member_id))

    def put_hub_token(self, name: str, token: str) -> HubToken:
        """Store a Hub token under a name, for models {"id": ..., "hub_token": name}. It cannot be read back."""
        answer = self._service.send("PUT", _path("hub-tokens", name), body={"token": token}, repeat=True)
        return HubToken.model_validate_json(answer.content)

    def hub_tokens(self) -> Sequence[HubToken]:
        """Return the names of the project's Hub tokens."""
        return [HubToken.model_validate(row) for row in self._service.send("GET", "/v1/hub-tokens").json()["data"]]

    def delete_hub_token(self, name: str) -> None:
        """Delete a Hub token. Raises ApiError `hub_token_not_found`."""
        self._service.send("DELETE", _path("hub-tokens", name))

    def projects(self) -> Sequence[Project]:
        """Return the key's own project; for an operator, all projects."""
        return [Project.model_validate(row) for row in self._service.send("GET", "/v1/projects").json()["data"]]

    def create_project(self, name: str, /, **quotas: int | None) -> Project:
        """Create a project. Quotas are those that `usage` lists, and `requests_per_minute`."""
        answer = self._service.send("POST", "/v1/projects", body={"name": name, **quotas})
        return Project.model_validate_json(answer.content)

    def edit_project(self, project_id: str, changes: Mapping[str, Any]) -> Project:
        """Change the name or quotas of a project; None removes a limit."""
        answer = self._service.send("PATCH", _path("projects", project_id), body=changes)
        return Project.model_validate_json(answer.content)

    def usage(self) -> Sequence[QuotaUse]:
        """Return the project's usage of each quota."""
        return [QuotaUse.model_validate(row) for row in self._service.send("GET", "/v1/usage").json()["quotas"]]

    def workers(self) -> Sequence[Worker]:
        """Return the live workers (operators only)."""
        return [Worker.model_validate(row) for row in self._service.send("GET", "/v1/workers").json()["data"]]

    def order_worker(self, worker_id: str, order: str) -> Worker:
        """Order a worker to `drain` (take no jobs and give back its own) or `uncordon` (take jobs again)."""
        answer = self._service.send("POST", f"{_path('workers', worker_id)}/{order}", repeat=True)
        return Worker.model_validate_json(answer.content)

    def audit(
        self,
        *,
        action: str | None = None,
        object_id: str | None = None,
        project_id: str | None = None,
        page_size: int = 100,
    ) -> Iterator[AuditEntry]:
        """Yield the audit log, newest first, loaded page by page. `project_id` may be `all` for an operator."""
        wanted = {"action": action, "object_id": object_id, "project_id": project_id, "limit": page_size}
        for row in self._pages("/v1/audit", _given(wanted)):
            yield AuditEntry.model_validate(row)

    def _pages(self, path: str, query: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
        while True:
            page = self._service.send("GET", path, query=query).json()
            yield from page["data"]
            if not page["has_more"]:
                return
            query = query | {"cursor": page["next_cursor"]}

    def _key(self, method: str, path: str, *, body: Mapping[str, Any] | None = None) -> Key:
        return Key.model_validate_json(self._service.send(method, path, body=body).content)


def _path(kind: str, identity: str) -> str:
    return f"/v1/{kind}/{quote(identity, safe='')}"


def _time(time: datetime | str | None) -> str | None:
    return time.isoformat() if isinstance(time, datetime) else time


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
