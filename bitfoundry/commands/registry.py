"""The commands `bitfoundry registry ...`: versions of models, their aliases, and requests to move a protected one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bitfoundry.commands import terminal
from bitfoundry.commands.options import AsJson, JobId, show_deleted, with_client
from bitfoundry.commands.verdicts import shipping_warning
from bitfoundry.errors import BitfoundryError

if TYPE_CHECKING:
    from bitfoundry.client.model_answers import Actor, AliasRequest, ModelVersion, RegisteredModel
    from bitfoundry.client.service import Client

ModelName = Annotated[str, typer.Argument(help="Model of the registry: lower-case letters, digits, '.', '_' and '-'.")]
Reference = Annotated[
    str, typer.Argument(metavar="MODEL@VERSION", help="Version: its number or an alias, such as support-bot@candidate.")
]
RequestId = Annotated[str, typer.Argument(help="Request: its id or the start of it, or `last`.")]
Reason = Annotated[
    str | None, typer.Option(help="Reason for the one who approves. Needed for a protected alias, and only there.")
]
Comment = Annotated[str | None, typer.Option(help="Comment, which the audit log keeps.")]


@with_client
def list_models(client: Client, as_json: AsJson = False) -> None:
    """List the models with their aliases and the number of pending requests."""
    models = [*client.registry.models()]
    if as_json:
        terminal.print_json([model.model_dump(mode="json") for model in models])
        return
    rows = [
        {"model": model.name, "latest_version": model.latest_version, "verdict": model.latest_verdict}
        | {"aliases": _aliases_text(model), "num_pending": model.num_pending}
        for model in models
    ]
    columns = ("model", "latest_version", "verdict", "aliases", "num_pending")
    nothing = "The registry has no model yet. Add the first version: `bitfoundry registry add MODEL JOB_ID`."
    terminal.out.print(terminal.rows_table(rows, columns) if rows else nothing)


@with_client
def show(
    client: Client,
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model; MODEL@VERSION or MODEL@ALIAS shows one version.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show a model with its versions and pending requests, or one version."""
    if "@" in name:
        _show_version(client.registry.version(name), as_json)
        return
    model, versions = client.registry.model(name), [*client.registry.versions(name)]
    pending = [*client.registry.requests(state="pending", model=name)]
    if as_json:
        of_model = {
            "versions": [version.model_dump(mode="json") for version in versions],
            "requests": [request.model_dump(mode="json") for request in pending],
        }
        terminal.print_json(model.model_dump(mode="json") | of_model)
        return
    terminal.out.print(terminal.pairs({"model": model.name, "aliases": _aliases_text(model)}))
    rows_of_versions = [_version_row(version) for version in versions]
    columns = ("version", "aliases", "job", "format", "verdict", "size", "added")
    terminal.out.print(terminal.rows_table(rows_of_versions, columns) if versions else "It has no version.")
    if pending:
        terminal.out.print("Pending requests:")
        terminal.out.print(_requests_table(pending))


@with_client
def add(client: Client, name: ModelName, job_id: JobId, as_json: AsJson = False) -> None:
    """Add the result of a succeeded job as the next version of a model. It is safe to repeat."""
    version = client.registry.add(name, job_id)
    if as_json:
        terminal.print_json(version.model_dump(mode="json"))
    else:
        terminal.out.print(f"{version.model}@{version.version}")
    _warn_of(client, version)


@with_client
def promote(
    client: Client,
    reference: Reference,
    alias: Annotated[str, typer.Argument(help="Alias that shall point to the version, such as production.")],
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias to a version. For a protected alias this is a request, which another member approves."""
    version = client.registry.version(reference)
    _move(client, version.model, alias, version.version, reason, as_json)
    _warn_of(client, version)


@with_client
def list_requests(
    client: Client,
    model: Annotated[str | None, typer.Argument(help="Only requests of this model.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also those that were decided or withdrawn.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the pending requests to move a protected alias, newest first."""
    requests = [*client.registry.requests(state=None if every else "pending", model=model)]
    if as_json:
        terminal.print_json([request.model_dump(mode="json") for request in requests])
    else:
        terminal.out.print(_requests_table(requests) if requests else "No requests.")


@with_client
def approve(client: Client, request_id: RequestId, comment: Comment = None, as_json: AsJson = False) -> None:
    """Approve the request of another member: the alias moves now. Needs a member's key with the role admin."""
    _show_request(client.registry.approve(request_id, comment), as_json)


@with_client
def refuse(client: Client, request_id: RequestId, comment: Comment = None, as_json: AsJson = False) -> None:
    """Refuse the request of another member: the alias stays. Needs a member's key with the role admin."""
    _show_request(client.registry.refuse(request_id, comment), as_json)


@with_client
def withdraw(client: Client, request_id: RequestId, comment: Comment = None, as_json: AsJson = False) -> None:
    """Withdraw a request of your own."""
    _show_request(client.registry.withdraw(request_id, comment), as_json)


@with_client
def remove(
    client: Client,
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="MODEL@VERSION removes a version, MODEL@ALIAS an alias, MODEL alone all of it."
        ),
    ],
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """Remove a version, an alias or a model from the registry. The job and its files stay."""
    from bitfoundry.client.registry import split_reference

    model, version = split_reference(name) if "@" in name else (name, "")
    if version and not version.isdecimal():
        _move(client, model, version, None, reason, as_json)
        return
    _check_reason(reason, needed=False)
    if version:
        client.registry.remove_version(model, int(version))
    else:
        client.registry.remove_model(model)
    show_deleted(name, as_json)


@with_client
def protect(
    client: Client,
    aliases: Annotated[list[str] | None, typer.Argument(help="All aliases that shall be protected.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Protect no alias.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show or set the aliases that only an approved request moves, for all models of the project."""
    if aliases and none:
        raise typer.BadParameter("--none takes no aliases")
    registry = client.registry
    protected = registry.protect(aliases or []) if aliases or none else registry.protected_aliases()
    if as_json:
        terminal.print_json({"aliases": protected})
    else:
        terminal.out.print("\n".join(protected) or "No alias is protected.")


def _move(client: Client, model: str, alias: str, version: int | None, reason: str | None, as_json: bool) -> None:
    """Move an alias; None removes it. For a protected one ask for it."""
    is_protected = alias in client.registry.protected_aliases()
    _check_reason(reason, needed=is_protected)
    if reason is not None:
        _show_request(client.registry.request(model, alias, version, reason), as_json)
    elif version is None:
        client.registry.remove_alias(model, alias)
        show_deleted(f"{model}@{alias}", as_json)
    else:
        moved = client.registry.move_alias(model, alias, version)
        if as_json:
            terminal.print_json(moved.model_dump(mode="json"))
        else:
            terminal.out.print(f"{model}@{alias} is version {version} now.")


def _warn_of(client: Client, version: ModelVersion) -> None:
    """Say on stderr why a version may not be shipped as it is, if so."""
    warning = shipping_warning(f"{version.model}@{version.version}", client.get(version.job_id))
    if warning:
        terminal.err.print(Text.assemble(("warning ", "yellow"), warning), soft_wrap=True)


def _check_reason(reason: str | None, *, needed: bool) -> None:
    if needed and reason is None:
        raise BitfoundryError(
            "The alias is protected: only an approved request moves it.",
            code="reason_required",
            hint="Ask for it with --reason 'why it is better': another member approves it. If you work alone,"
            " `bitfoundry registry protect --none` lets you move it yourself.",
        )
    if reason is not None and not needed:
        raise BitfoundryError(
            "This needs no approval, so that nobody would read the reason.",
            code="reason_not_needed",
            hint="Leave --reason out.",
        )


def _aliases_text(model: RegisteredModel) -> str:
    return ", ".join(f"{each.alias}: {each.version}" for each in model.aliases)


def _version_row(version: ModelVersion) -> dict[str, Any]:
    return {
        "version": version.version,
        "aliases": ", ".join(version.aliases),
        "job": version.name or version.job_id,
        "format": ", ".join(version.export),
        "verdict": version.verdict,
        "size": terminal.megabytes(version.bytes),
        "added": version.created_at[:10],
    }


def _show_version(version: ModelVersion, as_json: bool) -> None:
    if as_json:
        terminal.print_json(version.model_dump(mode="json"))
        return
    shown = {"model": f"{version.model}@{version.version}", "aliases": ", ".join(version.aliases)}
    shown |= {"job": version.job_id, "source": version.source, "format": ", ".join(version.export)}
    shown |= {"verdict": version.verdict or "", "size": terminal.megabytes(version.bytes), "sha256": version.sha256}
    added = f"{version.created_at[:19]} by {_name_of(version.added_by)}"
    terminal.out.print(terminal.pairs(shown | {"added": added}))


def _requests_table(requests: Sequence[AliasRequest]) -> Any:
    rows = [
        {"id": request.id, "alias": f"{request.model}@{request.alias}", "version": _change_text(request)}
        | {"verdict": request.verdict, "asked_by": _name_of(request.asked_by)}
        | {"state": request.state, "reason": request.reason}
        for request in requests
    ]
    return terminal.rows_table(rows, ("id", "alias", "version", "verdict", "asked_by", "state", "reason"))


def _show_request(request: AliasRequest, as_json: bool) -> None:
    if as_json:
        terminal.print_json(request.model_dump(mode="json"))
        return
    decided = request.decided_by and f"{request.state} by {_name_of(request.decided_by)}"
    shown = {"request": request.id, "alias": f"{request.model}@{request.alias}", "version": _change_text(request)}
    shown |= {"verdict": request.verdict or ""}
    shown |= {"asked by": _name_of(request.asked_by), "reason": request.reason, "state": decided or request.state}
    terminal.out.print(terminal.pairs(shown | {"comment": request.comment or ""}))


def _change_text(request: AliasRequest) -> str:
    return f"{request.from_version or 'none'} → {request.to_version or 'none'}"


def _name_of(actor: Actor | None) -> str:
    return "" if actor is None else actor.member.name if actor.member else actor.name


COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_models,
    "show": show,
    "add": add,
    "promote": promote,
    "requests": list_requests,
    "approve": approve,
    "refuse": refuse,
    "withdraw": withdraw,
    "remove": remove,
    "protect": protect,
}
