"""The operator's file for sign-in through an OpenID provider (``BITFOUNDRY_OIDC_FILE``), read when the API starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError

from quantcore.config.values import sentence_of
from quantcore.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
SIGN_IN_PAGE = "/ui/sign-in"
"""The page of the dashboard to which the provider sends a browser back."""


def is_secure(url: str) -> bool:
    """Return True for an https URL, and for an http URL of this machine itself."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in LOOPBACK))


def _check_issuer(url: str) -> str:
    parts = urlsplit(url)
    if not is_secure(url) or parts.query or parts.fragment or parts.username is not None:
        raise ValueError("must be an https address without user, query and fragment, as the provider writes it")
    return url


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text")
    return text


def _check_scopes(scopes: tuple[str, ...]) -> tuple[str, ...]:
    if "openid" not in scopes:
        raise ValueError("must contain 'openid'")
    return scopes


Text = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_check_printable)]
OidcRole = Literal["viewer", "editor", "admin", "operator"]


class Grant(BaseModel):
    """Whoever has ``value`` in the claim ``claim`` gets a role in a project.

    The claim is a text, or a list with the text in it. ``project`` is a project's name. ``operator`` is an admin of the
    project who also has the scope ``operator``, for the whole service.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    claim: Text
    value: Text
    project: Text
    role: OidcRole


class OidcConfig(BaseModel):
    """The provider, this service's registration there, and what its claims grant. ``name`` is on the dashboard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, StringConstraints(min_length=1, max_length=40), AfterValidator(_check_printable)]
    issuer: Annotated[str, AfterValidator(_check_issuer)]
    client_id: Text
    scopes: Annotated[tuple[Annotated[str, Field(pattern=r"^[!#-\[\]-~]+$")], ...], AfterValidator(_check_scopes)] = (
        "openid",
        "email",
    )
    grants: Annotated[tuple[Grant, ...], Field(min_length=1)]


@dataclass(frozen=True)
class OidcClient:
    """This service as a client of the provider (OpenID Connect Core 1.0, section 2)."""

    config: OidcConfig
    secret: SecretStr
    redirect_uri: str


def read_config(path: Path) -> OidcConfig:
    """Read the operator's file. Raises ConfigError ``invalid_oidc_file`` that names each fault and its place."""
    try:
        return OidcConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise _invalid(path, f"it cannot be read ({error.strerror})") from error
    except ValidationError as error:
        faults = (
            f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {sentence_of(fault)}"
            for fault in error.errors(include_url=False)
        )
        raise _invalid(path, "; ".join(faults)) from error


def _invalid(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"The file of BITFOUNDRY_OIDC_FILE, {path}, is not valid: {why}.",
        code="invalid_oidc_file",
        hint="docs/how-to/oidc.md has an example, and explains each field.",
    )
