"""Access to the Hub: the token of this machine, and whether a token may write to a target. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from quantcore.config.time_limits import HUB_S
from quantcore.errors import PublishError
from quantcore.hub.session import hub_api
from quantcore.hub.target import Target


@dataclass(frozen=True)
class Access:
    """The result of a check. ``url``: the repository's page. ``exists``: None if only the push itself can find out."""

    url: str
    exists: bool | None


def own_token() -> str | None:
    """Return the token of this machine's user: HF_TOKEN, or the one of ``hf auth login``."""
    from huggingface_hub import get_token

    return get_token()


def check_hub(target: Target, token: str) -> Access:
    """Ask the Hub for the token's owner and for the repository. Raises PublishError ``hub_*``.

    A fine-grained token does not list its rights: only the push itself finds out.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    from quantcore.hub.push_errors import hub_explained

    assert target.repo_id is not None
    api = hub_api(token)
    with hub_explained(target.repo_id, target.revision):
        account = api.whoami()
        role = account.get("auth", {}).get("accessToken", {}).get("role")
        namespaces = {account["name"], *(org["name"] for org in account.get("orgs", ()))}
        namespace = target.repo_id.partition("/")[0]
        if role == "read" or (namespace not in namespaces and not target.create_pr):
            why = "reads only" if role == "read" else f"belongs to {account['name']}, who is not in '{namespace}'"
            raise PublishError(
                f"The token cannot write to '{target.repo_id}': it {why}.",
                code="hub_forbidden",
                hint="Use a token with write access to that account or organization, or open a pull request "
                "(create_pr).",
                field="/publish/hub_token",
            )
        try:
            api.model_info(target.repo_id, timeout=HUB_S)
            exists = True
        except RepositoryNotFoundError:
            exists = False
    return Access(f"{api.endpoint}/{target.repo_id}", exists)
