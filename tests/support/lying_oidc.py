"""A stand-in for an OpenID provider that lies: a real HTTP server whose answers a test changes.

It is not the proof that sign-in works (tests/support/real_oidc.py is): it says what no certified provider would say.
"""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT_ID = "bitfoundry"
KEY = RSAKey.generate_key(2048, {"use": "sig", "kid": "one"})
OTHER_KEY = RSAKey.generate_key(2048, {"use": "sig", "kid": "one"})


@dataclass
class LyingProvider:
    """Tells the truth until a test changes it. ``answers``: the (status, body) of a path in place of the right one.

    ``drips_at``: the path whose answer comes a byte now and then, and has no end.
    """

    issuer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=lambda: {"alg": "RS256", "kid": "one"})
    key: Any = field(default_factory=lambda: KEY)
    make_token: Callable[[dict[str, Any]], str] | None = None
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    drips_at: str = ""
    nonce: str = ""
    code_challenge: str = ""
    num_requests: int = 0

    def visit(self, authorization_url: str) -> dict[str, str]:
        """Return what the browser brings back from the address."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(authorization_url).query).items()}
        self.nonce, self.code_challenge = asked["nonce"], asked["code_challenge"]
        return {"code": "the-code", "state": asked["state"]}

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.num_requests += 1
        if path in self.answers:
            return self.answers[path]
        if path == "/.well-known/openid-configuration":
            names = {"authorization_endpoint": "/auth", "token_endpoint": "/token", "jwks_uri": "/keys"}
            metadata: dict[str, Any] = {"issuer": self.issuer} | {k: self.issuer + v for k, v in names.items()}
            metadata |= {"id_token_signing_alg_values_supported": ["RS256"], "userinfo_endpoint": self.issuer + "/me"}
            return 200, json.dumps(metadata | self.metadata).encode()
        if path == "/keys":
            return 200, json.dumps({"keys": [KEY.as_dict(private=False)]}).encode()
        if path == "/me":
            return 200, json.dumps({"sub": "ada"}).encode()
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != self.code_challenge:
            return 400, b'{"error": "invalid_grant"}'
        now = int(time.time())
        claims = {"iss": self.issuer, "sub": "ada", "aud": CLIENT_ID, "iat": now, "exp": now + 60, "nonce": self.nonce}
        claims |= {"groups": ["ml-team"], "email": "ada@example.org", "email_verified": True} | self.claims
        claims = {name: value for name, value in claims.items() if value is not None}
        token = self.make_token(claims) if self.make_token else sign(claims, self.header, self.key)
        return 200, json.dumps({"access_token": "at", "token_type": "Bearer", "id_token": token}).encode()


def sign(claims: dict[str, Any], header: dict[str, Any], key: Any) -> str:
    return jwt.encode(header, claims, key, algorithms=[header["alg"]])


def unsigned(claims: dict[str, Any]) -> str:
    """A token with ``alg`` none (RFC 8725, section 2.1)."""
    parts = ({"alg": "none"}, claims)
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


@contextmanager
def serve() -> Iterator[LyingProvider]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = urlsplit(self.path).path
            status, content = provider.answer(path, body)
            with suppress(OSError):  # the client has hung up
                self.send_response(status)
                if path != provider.drips_at:
                    self.send_header("Content-Length", str(len(content)))
                if 300 <= status < 400:
                    self.send_header("Location", content.decode())
                self.end_headers()
                while path == provider.drips_at:  # until the client has had enough
                    self.wfile.write(b" ")
                    time.sleep(0.05)
                self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    provider = LyingProvider(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
