"""Calls for the model registry: `client.registry`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from bitfoundry.client.model_answers import Actor as Actor
from bitfoundry.client.model_answers import AliasRequest as AliasRequest
from bitfoundry.client.model_answers import ModelAlias as ModelAlias
from bitfoundry.client.model_answers import ModelVersion as ModelVersion
from bitfoundry.client.model_answers import RegisteredModel as RegisteredModel
from bitfoundry.client.transport import Transport
from bitfoundry.errors import ApiError, BitfoundryError

REFERENCE = re.compile(r"([a-z0-9][a-z0-9._-]*)@([1-9][0-9]*|[a-z][a-z0-9-]*)")
"""A version of a model by its number or an alias: support-bot@3, support-bot@production."""


class Registry:
    """Calls for the models of a project: versions, aliases, and requests to move a protected alias."""

    def __init__(self, service: Transport) -> None:
        self._service = service

    def models(self, *, page_size: int = 50) -> Iterator[RegisteredModel]:
        """Yield the models in the order of their names, loaded page by page."""
        yield from map(RegisteredModel.model_validate, self._rows("models", {"limit": page_size}))

    def model(self, name: str) -> RegisteredModel:
        """Return a model with its aliases. Raises ApiError `model_not_registered`."""
        return RegisteredModel.model_validate_json(self._service.send("GET", _path(name)).content)

    def versions(self, name: str, *, page_size: int = 50) -> Iterator[ModelVersion]:
        """Yield the versions of a model, newest first, loaded page by page."""
        yield from map(
            ModelVersion.model_validate, self._rows(f"models/{quote(name, safe='')}/versions", {"limit": page_size})
        )

    def version(self, reference: str) -> ModelVersion:
        """Return a version by its number or an alias: `support-bot@3`, `support-bot@production`.

        Raises BitfoundryError `invalid_reference`, ApiError `model_not_registered`, `version_not_found` or
        `alias_not_found`.
        """
        name, version = split_reference(reference)
        return ModelVersion.model_validate_json(self._service.send("GET", _path(name, "versions", version)).content)

    def find_version(self, reference: str) -> ModelVersion | None:
        """Return what `version` does; None for a text of another form, and for a model that is not registered."""
        if not REFERENCE.fullmatch(reference):
            return None
        try:
            return self.version(reference)
        except ApiError as error:
            if error.code != "model_not_registered":
                raise
            return None

    def add(self, name: str, job_id: str) -> ModelVersion:
        """Add the result of a succeeded job as the next version; the first version makes the model.

        It is safe to repeat. Raises ApiError `not_ready`.
        """
        answer = self._service.send("POST", _path(name, "versions"), body={"job_id": job_id}, repeat=True)
        return ModelVersion.model_validate_json(answer.content)

    def move_alias(self, name: str, alias: str, version: int) -> RegisteredModel:
        """Point an alias to a version. Raises ApiError `alias_protected`: then `request` it."""
        answer = self._service.send("PUT", _path(name, "aliases", alias), body={"version": version}, repeat=True)
        return RegisteredModel.model_validate_json(answer.content)

    def remove_alias(self, name: str, alias: str) -> None:
        """Remove an alias; its version stays. Raises ApiError `alias_protected`: then `request` it."""
        self._service.send("DELETE", _path(name, "aliases", alias))

    def remove_version(self, name: str, version: int) -> None:
        """Remove a version that no alias points to. Its job stays, and may be deleted. Raises ApiError `in_use`."""
        self._service.send("DELETE", _path(name, "versions", str(version)))

    def remove_model(self, name: str) -> None:
        """Remove a model without aliases, with its versions. Their jobs stay. Raises ApiError `in_use`."""
        self._service.send("DELETE", _path(name))

    def request(self, name: str, alias: str, version: int | None, reason: str) -> AliasRequest:
        """Ask to move a protected alias to a version; None: to remove it. Another member approves it."""
        body = {"alias": alias, "version": version, "reason": reason}
        answer = self._service.send("POST", _path(name, "requests"), body=body, repeat=True)
        return AliasRequest.model_validate_json(answer.content)

    def requests(
        self, *, state: str | None = None, model: str | None = None, page_size: int = 50
    ) -> Iterator[AliasRequest]:
        """Yield the requests, newest first, loaded page by page."""
        wanted = {"state": state, "model": model, "limit": page_size}
        query = {name: value for name, value in wanted.items() if value is not None}
        yield from map(AliasRequest.model_validate, self._rows("requests", query))

    def approve(self, request_id: str, comment: str | None = None) -> AliasRequest:
        """Approve the request of another member: the alias moves. Raises ApiError `own_request`."""
        return self._decide(request_id, "approve", comment)

    def refuse(self, request_id: str, comment: str | None = None) -> AliasRequest:
        """Refuse the request of another member: the alias stays. Raises ApiError `own_request`."""
        return self._decide(request_id, "refuse", comment)

    def withdraw(self, request_id: str, comment: str | None = None) -> AliasRequest:
        """Withdraw a request of your own. Raises ApiError `not_your_request`."""
        return self._decide(request_id, "withdraw", comment)

    def protected_aliases(self) -> Sequence[str]:
        """Return the aliases that only an approved request moves."""
        return list(self._service.send("GET", "/v1/registry/protected-aliases").json()["aliases"])

    def protect(self, aliases: Sequence[str]) -> Sequence[str]:
        """Set the aliases that only an approved request moves, for all models of the project (`admin`)."""
        body = {"aliases": [*aliases]}
        answer = self._service.send("PUT", "/v1/registry/protected-aliases", body=body, repeat=True)
        return list(answer.json()["aliases"])

    def _decide(self, request_id: str, how: str, comment: str | None) -> AliasRequest:
        path = f"/v1/registry/requests/{quote(request_id, safe='')}/{how}"
        return AliasRequest.model_validate_json(self._service.send("POST", path, body={"comment": comment}).content)

    def _rows(self, path: str, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        query = dict(query)
        while True:
            page = self._service.send("GET", f"/v1/registry/{path}", query=query).json()
            yield from page["data"]
            if not page["has_more"]:
                return
            query["cursor"] = page["next_cursor"]


def split_reference(reference: str) -> tuple[str, str]:
    """Return the name, and the number or the alias, of 'support-bot@3'. Raises BitfoundryError `invalid_reference`."""
    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise BitfoundryError(
            f"'{reference}' does not name a version of a model.",
            code="invalid_reference",
            hint="Write MODEL@VERSION or MODEL@ALIAS, such as support-bot@3 or support-bot@production.",
        )
    return match[1], match[2]


def _path(name: str, *parts: str) -> str:
    return "/v1/registry/models/" + "/".join(quote(part, safe="") for part in (name, *parts))
