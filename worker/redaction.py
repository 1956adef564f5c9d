"""Removes secrets and the server's folders from an engine's output before it is stored.

Engines read models that strangers made, and users read the engines' output.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from api.settings import Settings

MASK = "***"
MIN_SECRET_LENGTH = 8  # a shorter value would mask half of every log

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_KEY|ACCOUNT_KEY|STORAGE_KEY|_SAS|CREDENTIAL", re.IGNORECASE
)
_PATTERNS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), MASK),  # Hugging Face
    (re.compile(r"\bbf_[0-9a-f]{12}_[0-9A-Za-z_-]{43}"), MASK),  # ours
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(r"(://)[^/\s@\"']+@"), rf"\1{MASK}@"),  # a URL's user and password
    (
        re.compile(
            r"([?&](?:X-Amz-[A-Za-z-]+|Signature|Policy|Key-Pair-Id|token|sig|access_token|api_key)=)[^&\s\"']+",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),  # a signed URL's credentials
)


PROGRAMS = {str(Path(__file__).parents[1]): "<bitfoundry>", sys.prefix: "<python>", sys.base_prefix: "<python>"}


class Redactor:
    """Masks ``secrets`` and everything that looks like a key. Replaces ``folders`` (paths) by their names."""

    def __init__(self, secrets: Iterable[str] = (), folders: Mapping[str, str] | None = None) -> None:
        self._secrets: list[str] = []
        # The longest first: a path may contain another. A path ends where no further letter of its last name follows.
        longest_first = sorted((folders or {}).items(), key=lambda folder: -len(folder[0]))
        self._folders = [(re.compile(rf"{re.escape(path)}(?![\w.-])"), name) for path, name in longest_first]
        for secret in secrets:
            self.hide(secret)

    @classmethod
    def of_worker(cls, settings: Settings, environment: Mapping[str, str] = os.environ) -> Redactor:
        """Make a redactor for the values of secret variables and for the paths of the service.

        Variables are recognized by their names. Paths are those of the programs and of the data folder.
        """
        secrets = (value for name, value in environment.items() if _SECRET_NAME.search(name))
        return cls(secrets, {**PROGRAMS, str(settings.data_dir): "<data>"})

    def hide(self, secret: str) -> None:
        """Mask ``secret``, too, from now on."""
        if len(secret) >= MIN_SECRET_LENGTH:
            # the longest first: a secret may contain another
            self._secrets = sorted({*self._secrets, secret}, key=len, reverse=True)

    def clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        for pattern, mask in (*_PATTERNS, *self._folders):
            text = pattern.sub(mask, text)
        return text

    def clean_all(self, value: Any) -> Any:
        """Return ``value`` (from JSON) with every string in it cleaned, names included."""
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, dict):
            return {self.clean(name): self.clean_all(member) for name, member in value.items()}
        if isinstance(value, list):
            return [self.clean_all(member) for member in value]
        return value
