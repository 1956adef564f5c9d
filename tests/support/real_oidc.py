"""A real OpenID provider for the tests: npm's oidc-provider, which is certified, as a process of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit

import httpx2
from joserfc.jwk import RSAKey

from tests.support.waiting import PATIENCE_S

FOLDER = Path(__file__).parent / "oidc"
CLIENT_ID = "bitfoundry"
SECRET = "a secret: 100 % of it + more"
"""With characters that RFC 6749, section 2.3.1, wants encoded."""
HOW = "Run the tests with `make test`, which installs it, or run `npm ci` in tests/support/oidc."


class RealProvider:
    """``accounts``: the claims of each person. A person signs in by name, with any password."""

    def __init__(self, folder: Path, redirect_uri: str, accounts: dict[str, dict[str, Any]]) -> None:
        if not (FOLDER / "node_modules").is_dir():
            raise RuntimeError(f"The OpenID provider of the tests is not installed. {HOW}")
        self._file = folder / "provider.json"
        self._redirect_uri = redirect_uri
        self.accounts = accounts
        self.issuer = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "RealProvider":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start with a new signing key, at the same address as before."""
        self._write(
            {"jwks": {"keys": [RSAKey.generate_key(2048, {"use": "sig"}, auto_kid=True).as_dict(private=True)]}}
        )
        node = shutil.which("node", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "node"
        port = str(urlsplit(self.issuer).port or 0)
        command = [node, str(FOLDER / "provider.mjs"), port, str(self._file)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.issuer = self._process.stdout.readline().strip()
        assert self.issuer.startswith("http://127.0.0.1:"), "the provider did not start"

    def stop(self) -> None:
        assert self._process is not None
        self._process.communicate(
            timeout=PATIENCE_S
        )  # ends its standard input: a signal would reach a wrapper of node alone

    def set_claims(self, person: str, **claims: Any) -> None:
        self.accounts[person] = self.accounts[person] | claims
        self._write(json.loads(self._file.read_text()))

    def sign_in(self, authorization_url: str, person: str) -> dict[str, str]:
        """Sign in at the provider's pages as a browser does. Returns what it adds to the address of the dashboard."""
        with httpx2.Client(trust_env=False, timeout=PATIENCE_S) as browser:
            answer = browser.get(authorization_url)
            for _ in range(10):
                while answer.is_redirect:
                    to = urljoin(str(answer.url), answer.headers["location"])
                    if to.startswith(self._redirect_uri):
                        return dict(parse_qsl(urlsplit(to).query))
                    answer = browser.get(to)
                assert answer.status_code == 200, answer.text
                action = re.search(r'action="([^"]+)"', answer.text)
                prompt = re.search(r'name="prompt" value="(\w+)"', answer.text)
                assert action and prompt, answer.text
                form = {"prompt": prompt[1], "login": person, "password": "any"}
                answer = browser.post(urljoin(str(answer.url), action[1]), data=form)
        raise AssertionError("the provider asked ten times")

    def _write(self, settings: dict[str, Any]) -> None:
        client = {"client_id": CLIENT_ID, "client_secret": SECRET, "redirect_uris": [self._redirect_uri]}
        self._file.write_text(json.dumps(settings | {"client": client, "accounts": self.accounts}))
