"""The requests to an OpenID provider: the authorization code flow with PKCE (OpenID Connect Core 1.0, RFC 7636).

Authlib and its JOSE part joserfc check the ID token. Nothing that the provider says is trusted before: an answer has
a bounded size and time, redirects are not followed, and compressed answers are not unfolded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

import httpx2
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from joserfc.jws import JWSRegistry

from api.oidc.config import OidcClient, is_secure
from quantcore.config.time_limits import OIDC_S

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
"""Algorithms with which a provider may sign ID tokens, if it announces them: only asymmetric ones."""
MAX_ANSWER_BYTES = 1 << 20
LEEWAY_S = 60  # between the clocks of the provider and of this machine
METADATA_S = 300.0  # how long the provider's own description is kept; its keys are read at each sign-in
MAX_SUBJECT = 255
NUM_AT_ONCE = 8  # conversations: whoever begins more waits, and stops nobody else's requests


class ProviderUnavailable(Exception):
    """The provider gives no answer. The message says why."""


class ProviderRefused(Exception):
    """The provider refuses, or says something that cannot be trusted. The message says what."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to sign in. Everything that binds it to a browser is derived from ``token``, 256 random bits.

    The token is only in the browser's cookie. ``state`` and ``nonce`` are seen by others, and lead neither to the token
    nor to the ``code_verifier``.
    """

    token: str

    @property
    def state(self) -> str:
        return self._derive("state")

    @property
    def nonce(self) -> str:
        return self._derive("nonce")

    @property
    def code_verifier(self) -> str:
        return self._derive("code verifier")

    def _derive(self, purpose: str) -> str:
        return hashlib.sha256(f"oidc {purpose} {self.token}".encode()).hexdigest()


@dataclass(frozen=True)
class Identity:
    """A person, as the provider names him: only ``subject`` never changes. ``email`` is None unless it is verified.

    ``claims``: those of the ID token, and those of the userinfo endpoint that the ID token lacks.
    """

    issuer: str
    subject: str
    email: str | None
    claims: Mapping[str, Any]


class Provider:
    """The provider of the operator's file. Lives in the app's event loop."""

    def __init__(self, client: OidcClient) -> None:
        self.client = client
        self._config = client.config
        self._tls = ssl.create_default_context()  # the system's authorities; SSL_CERT_FILE names others
        self.conversations = asyncio.Semaphore(NUM_AT_ONCE)
        self._metadata: tuple[float, dict[str, Any]] | None = None

    async def authorization_url(self, attempt: Attempt) -> str:
        """Return the address where a browser signs in. Raises ProviderUnavailable, ProviderRefused."""
        async with self._connect() as http:
            metadata = await self._read_metadata(http)
        url: str = prepare_grant_uri(
            metadata["authorization_endpoint"],
            self._config.client_id,
            "code",
            redirect_uri=self.client.redirect_uri,
            scope=self._config.scopes,
            state=attempt.state,
            nonce=attempt.nonce,
            code_challenge=create_s256_code_challenge(attempt.code_verifier),
            code_challenge_method="S256",
        )
        return url

    async def identify(self, attempt: Attempt, code: str) -> Identity:
        """Return the person for whom the provider gave ``code``. Raises ProviderUnavailable, ProviderRefused."""
        async with self._connect() as http:
            metadata = await self._read_metadata(http)
            tokens = await self._exchange(http, metadata, attempt, code)
            keys = await self._ask(http, "GET", metadata["jwks_uri"])
            claims = self._check(tokens, keys, metadata, attempt)
            claims = await self._add_userinfo(http, metadata, tokens, claims)
        email = claims.get("email") if claims.get("email_verified") is True else None
        return Identity(self._config.issuer, claims["sub"], email if isinstance(email, str) else None, claims)

    def _connect(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            verify=self._tls,
            follow_redirects=False,
            timeout=OIDC_S,
            headers={"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "bitfoundry-oidc/1"},
        )

    async def _read_metadata(self, http: httpx2.AsyncClient) -> dict[str, Any]:
        """Return the provider's description of itself (OpenID Connect Discovery 1.0)."""
        if self._metadata and time.monotonic() - self._metadata[0] < METADATA_S:
            return self._metadata[1]
        issuer = self._config.issuer
        metadata = await self._ask(http, "GET", issuer.rstrip("/") + "/.well-known/openid-configuration")
        if metadata.get("issuer") != issuer:
            raise ProviderRefused(
                f"it calls itself {metadata.get('issuer')!r:.200}, and the operator's file {issuer!r}"
            )
        for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
            self._check_endpoint(name, metadata.get(name))
        self._metadata = time.monotonic(), metadata
        return metadata

    def _check_endpoint(self, name: str, url: object) -> None:
        """Check that the URL is https; plain http is for a provider on this machine. Raises ProviderRefused."""
        is_local = self._config.issuer.startswith("http:")
        if not isinstance(url, str) or not is_secure(url) or (url.startswith("http:") and not is_local):
            raise ProviderRefused(f"its {name} is {url!r:.200}, which is no https address")

    async def _exchange(
        self, http: httpx2.AsyncClient, metadata: Mapping[str, Any], attempt: Attempt, code: str
    ) -> dict[str, Any]:
        """Return what the provider gives for the code, among it the ID token (RFC 6749, section 4.1.3)."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.client.redirect_uri,
            "code_verifier": attempt.code_verifier,
        }
        secret, auth = self.client.secret.get_secret_value(), None
        methods = _texts(metadata, "token_endpoint_auth_methods_supported")
        if not methods or "client_secret_basic" in methods:  # the default of the standard
            auth = httpx2.BasicAuth(quote_plus(self._config.client_id), quote_plus(secret))
        else:
            form |= {"client_id": self._config.client_id, "client_secret": secret}
        return await self._ask(http, "POST", metadata["token_endpoint"], data=form, auth=auth)

    def _check(
        self, tokens: Mapping[str, Any], keys: dict[str, Any], metadata: Mapping[str, Any], attempt: Attempt
    ) -> dict[str, Any]:
        """Return the claims of the ID token (OpenID Connect Core 1.0, section 3.1.3.7). Raises ProviderRefused."""
        announced = _texts(metadata, "id_token_signing_alg_values_supported")
        allowed = [name for name in ALGORITHMS if name in announced]
        if not allowed:  # for joserfc an empty list would mean its own
            raise ProviderRefused(f"it signs ID tokens with none of {', '.join(ALGORITHMS)}")
        config = self._config
        try:
            registry = JWSRegistry(algorithms=allowed, strict_check_header=False)
            signing = [key for key in keys["keys"] if key.get("use", "sig") == "sig"]
            token = jwt.decode(tokens["id_token"], KeySet.import_key_set({"keys": signing}), allowed, registry)
            claims = CodeIDToken(
                token.claims,
                token.header,
                {"iss": {"value": config.issuer}, "aud": {"value": config.client_id}},
                {"nonce": attempt.nonce, "client_id": config.client_id, "access_token": tokens.get("access_token")},
            )
            claims.validate(leeway=LEEWAY_S)
        except JoseError as error:
            raise ProviderRefused(f"its ID token is not valid ({error})") from error
        except Exception as error:  # whatever else a stranger's answer makes the libraries raise
            raise ProviderRefused(f"its ID token or its keys are malformed ({type(error).__name__})") from error
        subject = claims["sub"]
        if not subject or len(subject) > MAX_SUBJECT or not subject.isprintable():
            raise ProviderRefused(f"the claim 'sub' of its ID token is not 1 to {MAX_SUBJECT} printable characters")
        return dict(claims)

    async def _add_userinfo(
        self, http: httpx2.AsyncClient, metadata: Mapping[str, Any], tokens: Mapping[str, Any], claims: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the claims with those of the userinfo endpoint, which is asked only if one is missing."""
        wanted = {grant.claim for grant in self._config.grants} | {"email", "email_verified"}
        url, access_token = metadata.get("userinfo_endpoint"), tokens.get("access_token")
        if wanted <= claims.keys() or not isinstance(url, str) or not isinstance(access_token, str):
            return claims
        self._check_endpoint("userinfo_endpoint", url)
        more = await self._ask(http, "GET", url, headers={"Authorization": f"Bearer {access_token}"})
        if more.get("sub") != claims["sub"]:
            raise ProviderRefused("its userinfo endpoint answers for somebody else than its ID token")
        return more | claims

    async def _ask(self, http: httpx2.AsyncClient, method: str, url: str, **request: Any) -> dict[str, Any]:
        """Return the JSON object that the provider answers. Raises ProviderUnavailable, ProviderRefused."""
        where = f"{method} {url}"
        try:
            async with asyncio.timeout(OIDC_S), http.stream(method, url, **request) as response:
                content = b""
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise ProviderRefused(f"its answer to {where} is larger than {MAX_ANSWER_BYTES} bytes")
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise ProviderUnavailable(f"no answer to {where} within {OIDC_S:.0f} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise ProviderUnavailable(f"no connection for {where} ({type(error).__name__})") from error
        if response.status_code >= 500:
            raise ProviderUnavailable(f"it answered {where} with status {response.status_code}")
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if response.status_code != 200:
            reason = answer.get("error") if isinstance(answer, dict) else None  # RFC 6749, section 5.2
            raise ProviderRefused(f"it answered {where} with status {response.status_code}, {reason!r:.100}")
        if not isinstance(answer, dict):
            raise ProviderRefused(f"its answer to {where} is no JSON object")
        return answer


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(name)
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
